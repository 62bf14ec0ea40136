# SPDX-License-Identifier: Apache-2.0
"""The fitness of nodes to train: checks of each node, here and over a list of nodes."""
