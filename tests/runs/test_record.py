# SPDX-License-Identifier: Apache-2.0
"""``run.json`` holds typed values, and the file of an earlier version is read."""

import json
from pathlib import Path

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
        kept = {key: value for key, value in again[part].items() if key in earlier[part]}
        assert list(kept.items()) == list(earlier[part].items())
        assert all(value is None for key, value in again[part].items() if key not in earlier[part])
    assert read_record(folder) == RunRecord.model_validate_json(EARLIER.read_text())


@pytest.mark.parametrize(("part", "key"), [("result", "tokens_per_second"), ("environment", "torch_version")])
def test_a_key_that_nobody_knows_is_an_error(part: str, key: str) -> None:
    spoiled = json.loads(EARLIER.read_text())
    spoiled[part][key] = 1
    with pytest.raises(ValidationError, match=key):
        RunRecord.model_validate(spoiled)
