# SPDX-License-Identifier: Apache-2.0
"""What it costs to train on a packed dataset: time to prepare a micro-batch, and steps with the loader.

The dataset has documents of lengths like SQuAD's, packed as ``llmb prepare dataset`` does it. Steps of the tiny Llama
model alternate between the loader and micro-batches that were prepared beforehand. Targets: a micro-batch of 4,096
tokens takes at most 5 ms, and steps wait for less than 1 % of their time.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.support import (
    Premade,
    join_alone,
    option_parser,
    prepare_trainee,
    print_result,
    read_options,
    tiny_plan,
)
from llmb.catalogue.resolve import Overrides
from llmb.engine.data.batches import Loader, RankData
from llmb.runs.checkpoints.prepared_data import ANSWERS, DOCUMENTS, PACKS, TOKENS, PackedDataset, TokenizerRecord
from llmb.runs.plan import EnginePlan, TrainingDataset
from llmb.setup.prepare.packed_files import pack

MEAN, SHORTEST, LONGEST = 157, 30, 900
"""Of SQuAD's documents, in tokens: about log-normal."""
WARM_UPS = 3
MOST_MS, MOST_WAIT_PCT = 5.0, 1.0


@dataclass(frozen=True, slots=True)
class Found:
    documents: int
    packs: int
    fill_pct: float
    seq_len: int
    micro_batch_ms: float
    """Median time to prepare a micro-batch of one sequence, with its documents for attention."""
    steps: int
    micro_batches: int
    premade_s: float
    loader_s: float
    ratio: float
    """Median over pairs of steps, one with the loader and one without."""
    wait_pct: float
    """Of the time of the steps with the loader, the part in which they waited for data."""


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder), options.documents, options.seq_len)
        found = measure(plan_of(dataset, options), options.pairs)
    shown = "".join(f"{name:16} {value:10.4g}\n" for name, value in asdict(found).items())
    print_result(found, shown, as_json=options.json)
    os._exit(0 if found.micro_batch_ms <= MOST_MS and found.wait_pct <= MOST_WAIT_PCT else 1)  # as a worker ends


def _options() -> argparse.Namespace:
    parser = option_parser(
        __doc__,
        documents=(100_000, "documents"),
        seq_len=(4096, "tokens per sequence"),
        micro_batches=(4, "of one sequence, a step"),
        pairs=(20, "pairs of steps"),
    )
    return read_options(parser, documents=500, seq_len=1024, micro_batches=1, pairs=2)


def write_dataset(folder: Path, documents: int, seq_len: int) -> TrainingDataset:
    """Random tokens in documents of lengths like SQuAD's; a tenth of each document is the answer."""
    rng = np.random.default_rng(1)
    places = np.clip(rng.lognormal(np.log(MEAN) - 0.08, 0.4, documents), SHORTEST, min(LONGEST, seq_len)).astype(int)
    packing = pack(places, seq_len, seed=1)
    sizes = places[packing.order] + 1
    ends = sizes.cumsum()
    tokens = np.arange(ends[-1])
    arrays = {
        TOKENS: rng.integers(2, 1024, ends[-1]).astype(np.uint32),
        ANSWERS: np.repeat(ends, sizes) - tokens <= np.repeat(sizes // 10 + 1, sizes),
        DOCUMENTS: np.concatenate(([0], ends)).astype(np.int64),
        PACKS: packing.packs,
    }
    for name, array in arrays.items():
        np.save(folder / name, array)
    record = PackedDataset(
        llmb_version="0",
        prepared_at="",
        name="random",
        source="benchmark",
        split="training",
        template="none",
        tokenizer=TokenizerRecord(name="none", sha256="", vocab_size=1024, bos_id=None, eos_id=1),
        seq_len=seq_len,
        documents=documents,
        left_out=0,
        packs=len(packing.packs) - 1,
        places=int(places.sum()),
        counted_labels=int(arrays[ANSWERS].sum()),
        longest_document=int(places.max()),
        sum_of_squares=int((places**2).sum()),
        files={name: (folder / name).stat().st_size for name in arrays},
        crc32={},
    )
    return TrainingDataset(path=str(folder), packed=record)


def plan_of(dataset: TrainingDataset, options: argparse.Namespace) -> EnginePlan:
    sizes = Overrides(seq_len=options.seq_len, mbs=1, gbs=options.micro_batches, layers=1)
    return tiny_plan(WARM_UPS + options.pairs, sizes).model_copy(update={"dataset": dataset})


def measure(plan: EnginePlan, pairs: int) -> Found:
    trainee = prepare_trainee(plan, join_alone(plan), varlen=True)
    source = trainee.source
    premade = Premade(replace(source.step(0), wait_s=0.0))
    with_loader, without, waited = [], [], 0.0
    with Loader(source, 0, plan.last_step) as loader:
        for number in range(plan.steps):
            times = []
            for side in (loader, premade):
                began = time.perf_counter()
                done = trainee.step(number, side)
                times.append(time.perf_counter() - began)
                waited += done[2].wait_s if number >= WARM_UPS else 0.0
            with_loader.append(times[0])
            without.append(times[1])
    with_loader, without = with_loader[WARM_UPS:], without[WARM_UPS:]
    packed = plan.dataset.packed if plan.dataset else None
    assert packed is not None
    return Found(
        documents=packed.documents,
        packs=packed.packs,
        fill_pct=100 * packed.fill,
        seq_len=packed.seq_len,
        micro_batch_ms=1e3 * statistics.median(micro_batch_seconds(source)),
        steps=pairs,
        micro_batches=plan.recipe.layout.ga,
        premade_s=statistics.median(without),
        loader_s=statistics.median(with_loader),
        ratio=statistics.median(ours / theirs for ours, theirs in zip(with_loader, without, strict=True)),
        wait_pct=100 * waited / sum(with_loader),
    )


def micro_batch_seconds(source: RankData, steps: int = 200) -> list[float]:
    """Times of micro-batches from all over the dataset, as the loader's thread prepares them."""
    found = [source.step(number) for number in range(steps)]
    return [step.wait_s / len(step.batches) for step in found]


if __name__ == "__main__":
    main()
