# SPDX-License-Identifier: Apache-2.0
"""Prepares a machine or a cluster for runs: installs llmb, and prepares data and checkpoints."""
