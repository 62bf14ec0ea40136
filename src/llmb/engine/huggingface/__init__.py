# SPDX-License-Identifier: Apache-2.0
"""Weights from checkpoints to safetensors files and back, in a bounded amount of memory."""
