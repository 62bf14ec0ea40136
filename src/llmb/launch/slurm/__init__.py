# SPDX-License-Identifier: Apache-2.0
"""Support for Slurm, in its own terms."""
