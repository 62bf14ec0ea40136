# SPDX-License-Identifier: Apache-2.0
"""Campaigns: select many jobs, read the files that list them, and queue each exactly once."""
