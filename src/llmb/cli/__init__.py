# SPDX-License-Identifier: Apache-2.0
"""The command line: modules for commands and groups, each loaded only when it is called, and modules they share."""
