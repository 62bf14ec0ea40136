# SPDX-License-Identifier: Apache-2.0
"""The options and the specification of a job, independent of its program and its scheduler."""
