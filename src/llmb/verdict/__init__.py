# SPDX-License-Identifier: Apache-2.0
"""Whether a run is as fast as it should be, whether two groups of runs differ, and why a run is slow. Pure."""
