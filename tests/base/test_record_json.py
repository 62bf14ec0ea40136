# SPDX-License-Identifier: Apache-2.0
"""JSON that anyone may have written takes bounded memory, whatever is wrong with it."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.base.input_files import MOST_VALUES, MOST_VALUES_IN_LINE
from llmb.base.record import Record, first_problem
from llmb.readers.samples.samples import read_samples
from llmb.runs.folder import read_stored
from llmb.runs.huggingface.model_folder import read_json
from llmb.runs.rank_times import read_rank_times
from llmb.runs.steps import read_steps


class Inner(Record):
    number: int
    word: str


class Outer(Record):
    several: tuple[Inner, ...]
    grouped: dict[str, tuple[Inner, ...]]


WRONG = {"several": [{}] * 50, "grouped": {"a": [{}] * 50}}


def test_of_a_list_in_json_only_the_first_wrong_item_is_reported_and_else_all() -> None:
    with pytest.raises(ValidationError) as of_json:
        Outer.model_validate_json(json.dumps(WRONG))
    assert of_json.value.error_count() == 4
    assert first_problem(of_json.value) == ("several.0.number", "Field required")
    with pytest.raises(ValidationError) as of_values:
        Outer.model_validate(WRONG)
    assert of_values.value.error_count() == 200


def test_a_file_of_too_many_values_is_not_read(tmp_path: Path) -> None:
    text = b'{"several": [' + b"{}," * (MOST_VALUES // 2) + b'{}], "grouped": {}}'
    with pytest.raises(ValidationError, match="it has more than 2,097,152 values"):
        Outer.model_validate_json(text)
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with pytest.raises(EnvironmentProblem, match="it is damaged: it has more than 2,097,152 values"):
        read_stored(file, Outer)
    with pytest.raises(UsageError, match=r"'config\.json' cannot be read: it has more than 2,097,152 values"):
        read_json(file)


def test_many_wrong_keys_are_counted_and_not_listed(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({f"k{number}": 1 for number in range(2000)}))
    with pytest.raises(EnvironmentProblem, match="it is damaged: 2,002 of its values are wrong"):
        read_stored(file, Outer)


def test_a_line_of_too_many_values_is_no_line(tmp_path: Path) -> None:
    numbers = "1.0," * MOST_VALUES_IN_LINE
    line = f'{{"first_step": 0, "last_step": 0, "layer_us": [{numbers}1.0]}}\n'
    for name, read in (("rank_times.jsonl", read_rank_times), ("metrics.jsonl", read_steps)):
        (tmp_path / name).write_text(line * 2)
        with pytest.raises(EnvironmentProblem, match="the line is damaged or incomplete"):
            read(tmp_path / name)
    (tmp_path / "node1.jsonl").write_text(line)
    assert read_samples(tmp_path) == ()
