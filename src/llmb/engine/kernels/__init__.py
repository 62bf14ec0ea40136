# SPDX-License-Identifier: Apache-2.0
"""The engine's own operations: casts to FP8, as Triton kernels and as torch code for reference; span attention."""
