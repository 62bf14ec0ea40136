# SPDX-License-Identifier: Apache-2.0
"""Nodes before and beside training: whether they are fit, and how fast their parts are."""
