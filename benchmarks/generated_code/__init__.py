# SPDX-License-Identifier: Apache-2.0
"""Counts what the code that is generated for a GPU reads and writes, on a machine without one."""
