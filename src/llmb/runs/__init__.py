# SPDX-License-Identifier: Apache-2.0
"""One run: its plan, its folder, the files in it and its result."""
