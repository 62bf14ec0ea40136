# SPDX-License-Identifier: Apache-2.0
import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

Event = dict[str, Any]


def span(category: str, name: str, start: float, end: float, tid: int = 1, **args: object) -> Event:
    """An event as the profiler writes it; times in microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": tid,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    """Writes events as a trace of the PyTorch profiler."""

    def write(events: Iterable[Event], name: str = "trace.json", rank: int | None = None) -> Path:
        document: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": []}
        if rank is not None:
            document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 8}
        text = json.dumps({**document, "traceEvents": list(events), "traceName": name}).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return path

    return write


@pytest.fixture(name="span")
def span_maker() -> Callable[..., Event]:
    return span
