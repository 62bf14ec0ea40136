# SPDX-License-Identifier: Apache-2.0
"""The specification of a job, independent of its program and its scheduler."""
