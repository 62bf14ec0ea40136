# SPDX-License-Identifier: Apache-2.0
"""Notices runs that stand still, and ends them with the reason."""
