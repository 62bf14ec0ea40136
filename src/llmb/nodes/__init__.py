# SPDX-License-Identifier: Apache-2.0
"""Checks nodes before training, measures the speed of their parts, and accepts machines."""
