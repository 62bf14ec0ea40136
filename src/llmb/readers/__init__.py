# SPDX-License-Identifier: Apache-2.0
"""Readers of what other programs wrote, one per format: logs, profiles, NCCL's output, samples of machines."""
