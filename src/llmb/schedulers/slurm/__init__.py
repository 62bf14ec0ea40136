# SPDX-License-Identifier: Apache-2.0
"""Slurm, and all that is said in its words."""
