# SPDX-License-Identifier: Apache-2.0
"""Training on torch.distributed. The only room that imports torch; it is reached through ``llmb.engine.worker``."""
