# SPDX-License-Identifier: Apache-2.0
"""Programs that a job runs: their command and variables, and the functions that read and conclude their runs."""
