# SPDX-License-Identifier: Apache-2.0
"""Run logs: their formats and reader, and the outcome of a run according to its log."""
