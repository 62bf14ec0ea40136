# SPDX-License-Identifier: Apache-2.0
"""From a plan to a job of Slurm: what is asked for, the batch script, and Slurm's own commands."""
