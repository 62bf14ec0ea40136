# SPDX-License-Identifier: Apache-2.0
"""Campaigns of many jobs: reading the files that list them, selecting the jobs, and queuing each exactly once."""
