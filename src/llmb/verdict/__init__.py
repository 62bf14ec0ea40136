# SPDX-License-Identifier: Apache-2.0
"""Functions that judge runs, compare groups of runs, and explain why a run is slow."""
