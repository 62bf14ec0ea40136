# SPDX-License-Identifier: Apache-2.0
"""Slurm, and everything in its own terms."""
