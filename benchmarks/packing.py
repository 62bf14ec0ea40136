# SPDX-License-Identifier: Apache-2.0
"""Packing of samples like SQuAD's, beside other packers: how full packs are, how long it takes, how even their cost is.

The other packers: first-fit as NeMo and Megatron-Bridge have it, where every document looks at every pack in turn, and
best-fit decreasing of TRL, if it is installed (pip install trl). Seconds are of processor time, so that other load on
the machine does not count. Target: 98 % full, in 10 s.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from llmb.setup.prepare.packed_files import pack

TARGET_S = 10.0
TARGET_FILL = 0.98
SEQ_LENS = (2048, 4096)
SEED = 1234
Packer = Callable[[np.ndarray, int], list[list[int]]]
"""From lengths and places of a pack to the lengths in each pack."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000, help="samples (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    cases = list(measure(options.samples))
    if options.json:
        sys.stdout.write(json.dumps(cases, indent=2) + "\n")
    else:
        sys.stdout.write(
            f"{'packer':28} {'to':>5} {'seconds':>8} {'packs':>7} {'full':>7} {'squares':>9} {'spread':>7}\n"
        )
        for case in cases:
            sys.stdout.write(
                f"{case['packer']:28} {case['seq_len']:5} {case['seconds']:8.2f} {case['packs']:7,} {case['fill']:7.2%}"
                f" {case['mean_squares']:9,.0f} {case['spread']:7.2%}\n"
            )
    ours = [case for case in cases if case["packer"] == "llmb"]
    sys.exit(0 if all(case["seconds"] <= TARGET_S and case["fill"] >= TARGET_FILL for case in ours) else 1)


def measure(samples: int) -> Iterator[dict[str, Any]]:
    """``spread``: standard deviation of a pack's squared lengths over their mean, which attention's time follows."""
    # With the mean of SQuAD's lengths, about 170 tokens, and a tail up to 900.
    lengths = np.clip(np.random.default_rng(SEED).gamma(5.0, 34.0, samples), 30, 900).astype(np.int64)
    packers: dict[str, Packer] = {"llmb": by_llmb, "first-fit scan (NeMo)": by_scan}
    if find_spec("trl"):
        packers["best-fit decreasing (TRL)"] = by_trl
    for seq_len in SEQ_LENS:
        for name, packer in packers.items():
            began = time.process_time()
            packs = packer(lengths, seq_len)
            seconds = time.process_time() - began
            if sorted(length for members in packs for length in members) != sorted(lengths.tolist()):
                raise RuntimeError(f"{name} lost documents")
            squares = np.array([sum(length * length for length in members) for members in packs])
            yield {
                "packer": name,
                "seq_len": seq_len,
                "seconds": seconds,
                "packs": len(packs),
                "fill": int(lengths.sum()) / (len(packs) * seq_len),
                "mean_squares": float(squares.mean()),
                "spread": float(squares.std() / squares.mean()),
            }


def by_llmb(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    packing = pack(lengths, seq_len, SEED)
    return [members.tolist() for members in np.split(lengths[packing.order], packing.packs[1:-1])]


def by_scan(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Of shuffled documents. NeMo sums each pack every time that it considers it; here sums are stored: faster."""
    packs: list[list[int]] = []
    room: list[int] = []
    for length in np.random.default_rng(SEED).permutation(lengths).tolist():
        number = next((n for n, free in enumerate(room) if free >= length), len(room))
        if number == len(room):
            packs.append([])
            room.append(seq_len)
        packs[number].append(length)
        room[number] -= length
    return packs


def by_trl(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    pack_dataset = import_module("trl").pack_dataset
    rows = import_module("datasets").Dataset.from_dict({"input_ids": [[0] * length for length in lengths.tolist()]})
    packed = pack_dataset(rows, seq_len, strategy="bfd")
    return [list(members) for members in packed["seq_lengths"]]


if __name__ == "__main__":
    main()
