# SPDX-License-Identifier: Apache-2.0
"""Matrix products in FP8: how tensors are scaled, multiplied, and which layers do it."""
