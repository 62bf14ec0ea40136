# SPDX-License-Identifier: Apache-2.0
"""The worker, with a torch that says that it is another version, or lacks a name: TORCH says which, as in 2.99.0."""

import os

import torch
import torch.utils.checkpoint

from llmb.engine.worker import main

TORCH = os.environ["TORCH"]
if TORCH[0].isdigit():
    torch.__version__ = TORCH
else:
    delattr(torch.utils.checkpoint, TORCH)
main()
