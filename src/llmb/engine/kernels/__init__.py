# SPDX-License-Identifier: Apache-2.0
"""The engine's own operations: casts to FP8, in Triton and in torch; span attention; a hook for FlashAttention 4."""
