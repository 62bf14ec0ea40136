# SPDX-License-Identifier: Apache-2.0
"""Short measurements of a machine's parts: their shapes and sizes, the jobs that measure, and the results."""
