# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as files: their records, checksums, folders that appear when complete, imports that resume."""
