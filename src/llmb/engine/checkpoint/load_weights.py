# SPDX-License-Identifier: Apache-2.0
"""Loads the weights that a training starts with, from a checkpoint of any layout and dtype."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from llmb.checkpoints.times import CheckpointTime
from llmb.engine.checkpoint.load import log_load, read_state
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.model.adapter import is_of_adapter
from llmb.engine.model.decoder import Decoder
from llmb.engine.parallel.mesh import Ranks


def load_weights(path: Path, stages: Sequence[Decoder], ranks: Ranks) -> CheckpointTime:
    """Reads all parameters of ``stages`` but those of adapters, each converted to its own dtype.

    ``path`` is the folder above ``weights``. A collective: all ranks have to call it. Raises UsageError if a tensor is
    missing or cannot be read.
    """
    start, began = time.time(), time.perf_counter()
    each = [
        {f"{MODEL}{name}": values for name, values in stage.named_values() if not is_of_adapter(name)}
        for stage in stages
    ]
    read_state(path, each)
    for stage in stages:
        stage.round_masters()
    dist.barrier()
    return log_load(start, time.perf_counter() - began, ranks)
