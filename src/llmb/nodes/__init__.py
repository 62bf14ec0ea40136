# SPDX-License-Identifier: Apache-2.0
"""Checks of nodes before and during training, and the speed of their parts."""
