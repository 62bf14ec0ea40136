# SPDX-License-Identifier: Apache-2.0
"""The memory, FLOPs and collectives of one rank of a run, counted without the run's devices."""
