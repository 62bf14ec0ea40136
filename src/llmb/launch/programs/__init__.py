# SPDX-License-Identifier: Apache-2.0
"""Programs that a job runs: the command, its variables, and how its run is read and concluded."""
