# SPDX-License-Identifier: Apache-2.0
"""Acceptance of a machine or of nodes: checks, measurements and trainings that say whether they are fast enough."""
