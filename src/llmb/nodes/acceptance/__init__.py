# SPDX-License-Identifier: Apache-2.0
"""Acceptance of a machine or nodes: checks, measurements and training that show whether they are fast enough."""
