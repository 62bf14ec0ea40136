# SPDX-License-Identifier: Apache-2.0
"""Saves the checkpoint that tests/data/checkpoints holds of each version of Python, with torch's own writer.

    python tests/support/save_checkpoint.py tests/data/checkpoints/3.13.0

made those of 3.11.2, 3.11.7, 3.12.1 and 3.13.0. Of 3.14 there was an interpreter for WebAssembly, without torch: its
pickle wrote the metadata of 3.13.0 again, with torch's classes of metadata and stand-ins for what they are made of.
"""

import sys
import warnings

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

TENSORS = {
    "model.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "model.half": torch.full((2,), 0.5, dtype=torch.float16),
    "optimizer.step": torch.tensor(7.0),
    "random.cpu": torch.arange(4, dtype=torch.uint8),
}

if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore"):  # torch says that there is one process only
        save(TENSORS, storage_writer=FileSystemWriter(sys.argv[1]), no_dist=True)
