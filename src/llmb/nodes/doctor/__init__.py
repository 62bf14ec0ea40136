# SPDX-License-Identifier: Apache-2.0
"""Checks whether this node, or each of several nodes, is fit to train."""
