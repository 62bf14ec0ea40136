# SPDX-License-Identifier: Apache-2.0
"""``run.json`` holds typed values, and the file of an earlier version is read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, read_record, write_record

EARLIER = Path(__file__).parent / "data" / "run-0.1.0.json"
"""Written when result and environment were mappings without a type."""


def test_the_record_of_an_earlier_version_is_read_with_its_result_and_environment() -> None:
    record = RunRecord.model_validate_json(EARLIER.read_text())
    assert record.result is not None
    assert record.result.step_time_s is not None
    assert record.result.step_time_s.mean == json.loads(EARLIER.read_text())["result"]["step_time_s"]["mean"]
    assert record.environment is not None
    assert record.environment.nodes == ("node1",)
    assert record.environment.attention is not None
    assert record.environment.attention.backend == "flash"


def test_what_is_written_again_has_the_same_keys_and_values(tmp_path: Path) -> None:
    folder, earlier = RunFolder(tmp_path), json.loads(EARLIER.read_text())
    write_record(folder, RunRecord.model_validate_json(EARLIER.read_text()))
    again = json.loads(folder.record.read_text())
    for part in ("result", "environment"):
        assert list(_leaves(again[part], earlier[part])) == list(_leaves(earlier[part], earlier[part]))
    assert read_record(folder) == RunRecord.model_validate_json(EARLIER.read_text())


def _leaves(value: Any, earlier: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Values by their keys, in order, without keys that ``earlier`` lacks, which have to be None."""
    if not isinstance(earlier, dict):
        yield path, value
        return
    for key, inner in value.items():
        if key in earlier:
            yield from _leaves(inner, earlier[key], (*path, key))
        else:
            assert inner is None, (*path, key)


@pytest.mark.parametrize(("part", "key"), [("result", "tokens_per_second"), ("environment", "torch_version")])
def test_a_key_that_nobody_knows_is_an_error(part: str, key: str) -> None:
    spoiled = json.loads(EARLIER.read_text())
    spoiled[part][key] = 1
    with pytest.raises(ValidationError, match=key):
        RunRecord.model_validate(spoiled)
