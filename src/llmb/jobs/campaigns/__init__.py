# SPDX-License-Identifier: Apache-2.0
"""Campaigns of many jobs: reads the files that list them, selects the jobs, and queues each exactly once."""
