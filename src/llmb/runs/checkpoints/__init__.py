# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and prepared data as files: records, checksums, folders that appear when complete."""
