# SPDX-License-Identifier: Apache-2.0
"""The input and the output of an adapter; both are files between two processes."""

from llmb.catalogue.records import Dtype, Model, Record, Training


class Job(Record):
    """A model and how to train it. A step is ``ga`` micro-batches of ``mbs`` sequences."""

    engine: str
    model: Model
    training: Training
    dtype: Dtype
    mbs: int
    ga: int
    seq_len: int
    warmup_steps: int
    timed_steps: int
    seed: int
    device: str
    compiled: bool


class Measured(Record):
    """``conventions`` list the precisions that the engine stores and computes in."""

    parameters: int
    step_times_s: tuple[float, ...]
    """Of the timed steps, in their order."""
    losses: tuple[float | None, ...]
    """Of all steps; None if not finite, for which JSON has no number."""
    peak_memory_bytes: int
    versions: dict[str, str]
    conventions: tuple[str, ...]
