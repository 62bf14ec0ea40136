# SPDX-License-Identifier: Apache-2.0
"""Prepared checkpoints and datasets of tiny models, with records that are true and contents that are not."""

import json
from pathlib import Path

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import find_model
from llmb.runs.checkpoints.prepared_data import ARRAYS, prepared_folders

DOCUMENTS = ((100, 20), (60,))
"""Places of the documents of each pack."""


def prepare_checkpoint(install: Path, workload: str, name: str | None = None) -> Path:
    """Imported weights where preparation puts them; ``name`` is by default the source's."""
    catalogue = Catalogue()
    source = catalogue.workloads[workload].sources.get("tiny")
    path = prepared_folders(install, workload).model(name or (source.model if source else "model"))
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "__0_0.distcp").write_bytes(b"weights")
    record = {
        "llmb_version": "0.1.0",
        "saved_at": "2026-01-01T00:00:00+00:00",
        "workload": workload,
        "size": "tiny",
        "dtype": None,
        "model": find_model(catalogue, workload, "tiny").model_dump(mode="json"),
        "layout": None,
        "training": None,
        "seed": None,
        "step": 0,
        "consumed_samples": 0,
        "optimizer_state": False,
        "imported_from": {"format": "huggingface", "path": f"/models/{path.name}", "files": []},
        "files": {"weights/__0_0.distcp": 7},
        "crc32": {"weights/__0_0.distcp": "12345678"},
    }
    (path / "checkpoint.json").write_text(json.dumps(record))
    return path


def prepare_dataset(install: Path, workload: str, **changes: object) -> Path:
    """A packed dataset of ``DOCUMENTS`` where preparation puts it; tokens are all 1, and the last of each is an answer.

    ``changes`` are those of its record, and ``vocab_size``.
    """
    import numpy as np

    source = Catalogue().workloads[workload].sources["tiny"]
    path = prepared_folders(install, workload).packed(source.dataset, source.model, "training", 128)
    path.mkdir(parents=True)
    lengths = [places + 1 for pack in DOCUMENTS for places in pack]
    ends = np.cumsum([0, *lengths])
    answers = np.zeros(ends[-1], dtype=bool)
    answers[ends[1:] - 1] = True
    arrays = {
        "tokens.npy": np.ones(ends[-1], dtype=np.uint32),
        "answers.npy": answers,
        "documents.npy": ends.astype(np.int64),
        "packs.npy": np.cumsum([0, *map(len, DOCUMENTS)]).astype(np.int64),
    }
    for name, array in arrays.items():
        np.save(path / name, array)
    places = [places for pack in DOCUMENTS for places in pack]
    tokenizer = {"name": source.model, "sha256": "0", "bos_id": 0, "eos_id": 1}
    record = {
        "llmb_version": "0.1.0",
        "prepared_at": "2026-01-01T00:00:00+00:00",
        "name": source.dataset,
        "source": "/data/training.jsonl",
        "split": "training",
        "template": "squad-1",
        "tokenizer": {**tokenizer, "vocab_size": changes.pop("vocab_size", 256)},
        "seq_len": 128,
        "documents": len(places),
        "left_out": 0,
        "packs": len(DOCUMENTS),
        "places": sum(places),
        "counted_labels": len(places),
        "longest_document": max(places),
        "sum_of_squares": sum(length**2 for length in places),
        "files": {name: (path / name).stat().st_size for name in ARRAYS},
        "crc32": dict.fromkeys(ARRAYS, "12345678"),
        **changes,
    }
    (path / "dataset.json").write_text(json.dumps(record))
    return path
