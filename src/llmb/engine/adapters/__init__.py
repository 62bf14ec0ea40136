# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA) beside frozen weights: adding them, their checkpoints, and their exchange with peft."""
