# SPDX-License-Identifier: Apache-2.0
"""Reads profiler traces, and breaks down the time of a step."""

TORCH_FOLDER = "torch_profile"
NSYS_FOLDER = "nsys_profile"
NCCL_FOLDER = "nccl_trace"
NETWORK_FOLDER = "nccl_network"
NCCL_LOG_END, NCCL_STEPS_END = ".log", ".steps"
"""Suffixes of a process's NCCL log and of the file with the log's sizes at starts and ends of steps."""
