# SPDX-License-Identifier: Apache-2.0
"""Prepares datasets and checkpoints for runs."""
