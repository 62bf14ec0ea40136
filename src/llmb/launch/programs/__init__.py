# SPDX-License-Identifier: Apache-2.0
"""What a job runs: which command, in which variables, and how its run is read and concluded."""
