# SPDX-License-Identifier: Apache-2.0
"""What an option is: declared once, on the field it sets, and read from command lines, files and variables."""
