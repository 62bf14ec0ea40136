# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's performance script as a program, in its own container."""
