# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's performance script as a program of a job, in its own container."""
