# SPDX-License-Identifier: Apache-2.0
"""Whether nodes are fit to train: checks of each node, here and over a list of nodes."""
