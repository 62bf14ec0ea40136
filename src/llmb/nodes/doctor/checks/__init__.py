# SPDX-License-Identifier: Apache-2.0
"""Checks of a node by area: the facts, and their evaluation by the rules of ``rules.yaml``."""
