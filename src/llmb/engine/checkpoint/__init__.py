# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of all that training goes on from, with torch.distributed.checkpoint."""
