# SPDX-License-Identifier: Apache-2.0
"""Support for users of the reference suite: its variables, settings, scripts, logs and paths."""
