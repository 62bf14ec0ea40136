# SPDX-License-Identifier: Apache-2.0
"""Training on torch.distributed. It alone imports torch; it is started as ``llmb.engine.worker``."""
