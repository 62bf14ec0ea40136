# SPDX-License-Identifier: Apache-2.0
"""Training with torch.distributed. Only this package imports torch; it is started as ``llmb.engine.worker``."""
