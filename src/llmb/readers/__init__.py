# SPDX-License-Identifier: Apache-2.0
"""Readers of logs, profiles, NCCL's output and samples of nodes; also anomalies and contradictions of step times."""
