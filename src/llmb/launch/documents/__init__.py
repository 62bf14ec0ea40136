# SPDX-License-Identifier: Apache-2.0
"""All that exists for those who come from the reference suite: its variables, settings, logs and paths."""
