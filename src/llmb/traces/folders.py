# SPDX-License-Identifier: Apache-2.0
"""Where in a run's folder its traces lie."""

TORCH_FOLDER = "torch_profile"
NSYS_FOLDER = "nsys_profile"
NCCL_FOLDER = "nccl_trace"
NCCL_LOG_END, NCCL_STEPS_END = ".log", ".steps"
"""NCCL's log of a process, and beside it the size that the log had when each step began."""
