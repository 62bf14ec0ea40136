# SPDX-License-Identifier: Apache-2.0
"""Whole runs with an attention backend: what is recorded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LLAMA = ("-w", "pretrain_llama3.1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "backend", "why"),
    [
        ((*LLAMA, "--scale", "1", "--steps", "10"), "flash", "the first fused one"),  # a run of other tests, too
        ((*LLAMA, "--scale", "2", "--steps", "3", "--cp", "2", "--attention-backend", "math"), "math", "chosen"),
    ],
)
def test_the_backend_and_what_decided_it_are_recorded(
    finished: Callable[..., dict[str, Any]], options: tuple[str, ...], backend: str, why: str
) -> None:
    result = finished(*options)
    assert result["attention_backend"] == backend
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    attention = record["environment"]["attention"]
    assert (attention["backend"], attention["why"]) == (backend, why)
    (trial,) = attention["trials"]
    distance = trial.pop("distance")
    assert trial == {"backend": backend, "repeats_heads": False, "milliseconds": None, "problem": None}
    assert distance is None if backend == "math" else 0 < distance < 0.02
    assert record["result"]["attention_backend"] == backend
    assert record["environment"]["float32_matmul_precision"] == "highest"
    assert set(record["variables"]) <= set(record["environment"]["variables"]) | {"PYTHONUNBUFFERED"}
    assert record["variables"]
