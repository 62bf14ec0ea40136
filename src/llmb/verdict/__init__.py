# SPDX-License-Identifier: Apache-2.0
"""Judge runs, compare groups of runs, and explain why a run is slow. Pure."""
