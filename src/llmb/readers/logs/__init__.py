# SPDX-License-Identifier: Apache-2.0
"""Run logs: the step line, its reader, and the outcome of a run according to its log."""
