# SPDX-License-Identifier: Apache-2.0
"""Shared by every package: errors, missing values, options, records, files, processes, secrets, statistics."""
