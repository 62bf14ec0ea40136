# SPDX-License-Identifier: Apache-2.0
"""Preparation of runs: an installation, data and checkpoints."""
