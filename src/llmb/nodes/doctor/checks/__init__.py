# SPDX-License-Identifier: Apache-2.0
"""Checks of a node by area, which read facts and evaluate them by the rules in ``rules.yaml``."""
