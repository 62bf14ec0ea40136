# SPDX-License-Identifier: Apache-2.0
"""``run.json`` holds typed values; what is not of this form is refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from recorded_runs import gpu_record, times_around, write_run

from llmb.missing import Missing
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, read_record, write_record
from llmb.runs.record_file import BrokenRecord


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(write_run(tmp_path, gpu_record(), times_around(12.0)))


def test_what_is_written_again_has_the_same_keys_and_values(folder: RunFolder) -> None:
    written, record = folder.record.read_text(), read_record(folder)
    assert record.result and record.result.step_time_s and record.environment
    write_record(folder, record)
    assert folder.record.read_text() == written


def test_a_missing_value_is_null_with_its_reason_beside_it(folder: RunFolder) -> None:
    stored: dict[str, Any] = json.loads(folder.record.read_text())
    assert (stored["result"]["step_time_reason"], stored["result"]["verdict_reason"]) == (None, None)
    stored["result"] |= {"step_time_s": None, "step_time_reason": "too few steps"}
    record = RunRecord.model_validate_json(json.dumps(stored))
    assert record.result and record.result.step_time_s == Missing("too few steps")
    assert json.loads(record.model_dump_json()) == stored


@pytest.mark.parametrize(("part", "key"), [("result", "tokens_per_second"), ("environment", "torch_version")])
def test_a_key_that_nobody_knows_is_an_error(folder: RunFolder, part: str, key: str) -> None:
    spoiled: dict[str, Any] = json.loads(folder.record.read_text())
    spoiled[part][key] = 1
    with pytest.raises(ValidationError, match=key):
        RunRecord.model_validate(spoiled)


def test_a_record_of_a_development_version_is_refused_in_one_sentence(folder: RunFolder) -> None:
    folder.record.write_text(folder.record.read_text().replace('"schema_version": 3', '"schema_version": 2', 1))
    with pytest.raises(BrokenRecord, match="a development version before"):
        read_record(folder)
