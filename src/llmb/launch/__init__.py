# SPDX-License-Identifier: Apache-2.0
"""Starts jobs through the scheduler of a cluster, or on this machine."""
