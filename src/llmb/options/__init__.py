# SPDX-License-Identifier: Apache-2.0
"""Options: each is declared once, on the field that it sets, and read from command lines, files and variables."""
