# SPDX-License-Identifier: Apache-2.0
"""Parallelism: the device mesh, and one module per kind of parallelism."""
