# SPDX-License-Identifier: Apache-2.0
"""Short measurements of a machine's parts: shapes, sizes, formulas, the jobs that measure, and their results."""
