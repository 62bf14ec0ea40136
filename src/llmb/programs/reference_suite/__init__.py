# SPDX-License-Identifier: Apache-2.0
"""The reference suite's own launch scripts as a program."""
