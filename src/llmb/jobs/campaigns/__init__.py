# SPDX-License-Identifier: Apache-2.0
"""Campaigns: selecting many jobs, reading the files that name them, and queueing each exactly once."""
