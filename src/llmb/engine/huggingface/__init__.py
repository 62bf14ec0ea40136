# SPDX-License-Identifier: Apache-2.0
"""Converts weights from checkpoints to safetensors files and back, in bounded memory."""
