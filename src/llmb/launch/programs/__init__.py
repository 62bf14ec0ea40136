# SPDX-License-Identifier: Apache-2.0
"""Programs that jobs run: their commands and variables, and functions that read and conclude their runs."""
