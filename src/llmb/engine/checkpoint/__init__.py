# SPDX-License-Identifier: Apache-2.0
"""Saves and loads everything that training resumes from, with torch.distributed.checkpoint."""
