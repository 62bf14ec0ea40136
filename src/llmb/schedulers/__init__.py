# SPDX-License-Identifier: Apache-2.0
"""Who starts jobs: Slurm, or this machine."""
