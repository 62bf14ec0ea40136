# SPDX-License-Identifier: Apache-2.0
"""Everything for users of the reference suite: its variables, settings, logs and paths."""
