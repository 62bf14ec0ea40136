# SPDX-License-Identifier: Apache-2.0
"""Run logs: the step line, its reader, and what a log says about its run."""
