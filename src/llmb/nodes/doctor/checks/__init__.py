# SPDX-License-Identifier: Apache-2.0
"""Checks of a node by area: what is read, and how it is judged by the rules of ``rules.yaml``."""
