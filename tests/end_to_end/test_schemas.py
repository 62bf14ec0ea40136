# SPDX-License-Identifier: Apache-2.0
"""JSON documents of commands keep their keys and types: programs of users read them."""

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import freeze_schemas
import json_types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import gpu_record, times_around, write_run
from step_lines import step_line
from typer.testing import CliRunner

from llmb.cli.main import app, exit_code_of
from llmb.cli.parse import app as parse_app
from llmb.launch.programs.conclude import read_ended_run
from llmb.reports.output import json_text
from llmb.reports.run_report import run_document
from llmb.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "tests" / "data" / "root").glob("workloads/*/experiments/*/*/*/run.json"))
ENDED_RUNS = [path for path in RECORDS if '"status": "queued"' not in path.read_text()]


def test_every_schema_is_as_it_is_stored() -> None:
    current = freeze_schemas.current_schemas()
    assert {freeze_schemas.file_of(name) for name in current} == set(freeze_schemas.FROZEN.iterdir())
    for name, schema in current.items():
        breaks, news = freeze_schemas.changes(name, freeze_schemas.frozen(name), schema)
        assert not breaks, "programs of users break; 'make schemas' tells how to change a contract"
        assert not news, "run 'make schemas'"


@pytest.mark.parametrize(
    ("after", "breaks", "news"),
    [
        ({"a": ["integer"], "b": ["'x'", "null"]}, 0, 0),
        ({"b": ["'x'", "null"]}, 1, 0),
        ({"a": ["number"], "b": ["'x'", "null"]}, 1, 0),
        ({"a": ["integer", "null"], "b": ["'x'", "null"]}, 1, 0),
        ({"a": ["integer"], "b": ["null"]}, 1, 0),
        ({"a": ["integer"], "b": ["'x'", "'y'", "null"]}, 0, 1),
        ({"a": ["integer"], "b": ["'x'", "null"], "c": ["null"]}, 0, 1),
    ],
)
def test_what_breaks_and_what_is_new(after: dict[str, list[str]], breaks: int, news: int) -> None:
    found = freeze_schemas.changes("run", {"a": ["integer"], "b": ["'x'", "null"]}, after)
    assert tuple(map(len, found)) == (breaks, news)


class Inner(TypedDict):
    value: float | None
    more: NotRequired[int]


class Outer(TypedDict):
    kind: Literal["one", "two"]
    items: tuple[Inner, ...]
    by_name: dict[str, Inner]
    free: dict[str, Any]


SOUND = {
    "kind": "one",
    "items": [{"value": 1, "more": 2}, {"value": None}],
    "by_name": {"a": {"value": 0.5}},
    "free": {},
}


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({}, None),
        ({"kind": "three"}, "kind is 'three', not 'one' or 'two'"),
        ({"kind": None}, "kind is None, not 'one' or 'two'"),
        ({"other": 1}, "other is not in the schema"),
        ({"items": {}}, "items is {}, not list"),
        ({"items": [{}]}, "items[].value is missing"),
        ({"items": [{"value": "1"}]}, "items[].value is '1', not null or number"),
        ({"by_name": {"any": {}}}, "by_name.any.value is missing"),
        ({"by_name": {"any": {"value": 1, "more": 0.5}}}, "by_name.any.more is 0.5, not absent or integer"),
        ({"free": {"a": [{"b": None}], "c": 1}}, None),
        ({"free": []}, "free is [], not object"),
    ],
)
def test_a_document_is_held_against_its_schema(changes: dict[str, Any], violation: str | None) -> None:
    schema = json_types.schema_of([SOUND], {"": Outer})
    found = json_types.violations(SOUND | changes, schema)
    assert found == ([violation] if violation else [])


def test_a_missing_key_is_a_violation() -> None:
    schema = json_types.schema_of([SOUND], {"": Outer})
    assert json_types.violations({name: SOUND[name] for name in ("items", "by_name", "free")}, schema) == [
        "kind is missing"
    ]


@pytest.mark.parametrize("record", ENDED_RUNS, ids=lambda path: path.parents[1].name)
def test_the_documents_of_runs_are_of_the_schema(record: Path) -> None:
    folder = RunFolder(record.parent)
    document = run_document(read_ended_run(folder))
    assert json_types.violations(json.loads(json_text(document)), freeze_schemas.frozen("run")) == []


@pytest.mark.parametrize("options", [(), ("--group",), ("--scaling",)])
def test_the_document_of_parsed_logs_is_of_the_schema(tmp_path: Path, options: tuple[str, ...]) -> None:
    lines = [step_line(step) for step in range(50)]
    (tmp_path / "log-good.out").write_text("".join(lines))
    (tmp_path / "log-died.out").write_text("".join(lines[:20]))
    (tmp_path / "log-empty.out").touch()
    (tmp_path / "sbatch_good.out").touch()
    done = CliRunner().invoke(parse_app, [str(tmp_path), "--json", *options])
    assert json_types.violations(json.loads(done.stdout), freeze_schemas.frozen("parse")) == []


@pytest.mark.parametrize(
    ("schema", "command"),
    [
        ("run", ("result", "one")),
        ("judge", ("judge", "one")),
        ("judge", ("judge", "one", "--explain")),
        ("judge", ("judge", "before", "after", "--explain")),
        ("judge", ("judge", "after", "--against", "before")),
        ("judge", ("judge", "before", "--acceptance", "h100-node")),
        ("compare", ("compare", "before", "after")),
        ("compare", ("compare", "before", "other")),
        ("watch", ("watch", "one")),
        ("doctor", ("doctor", "--only", "cpu,memory,kernel,network", "--gpus", "99")),
        ("doctor", ("doctor", "--only", "gpu,disk", "--no-disk")),
        ("runs", ("runs",)),
        ("jobs list", ("jobs", "list")),
    ],
)
def test_the_document_of_a_command_is_of_the_schema(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    schema: str,
    command: tuple[str, ...],
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    for name, mean_s in (("one", 12.3), ("before", 12.3), ("before", 12.31), ("after", 13.3), ("after", 13.4)):
        write_run(tmp_path / name, gpu_record(), times_around(mean_s))
    write_run(tmp_path / "other", gpu_record(scale=16), times_around(12.3))
    paths = [str(tmp_path / word) if (tmp_path / word).is_dir() else word for word in command]
    if command[0] in ("result", "watch"):
        paths[1] = str(next((tmp_path / "one").rglob("run.json")).parent)
    assert exit_code_of(app, [*paths, "--json"]) in (0, 4, 5, 6)
    assert json_types.violations(json.loads(capsys.readouterr().out), freeze_schemas.frozen(schema)) == []


class Color(StrEnum):
    RED = "r\u00e9d"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DOCUMENTS = st.recursive(
    LEAVES | st.just(Color.RED),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
)


@given(DOCUMENTS)
def test_a_document_is_read_as_it_was(document):
    assert json.loads(json_text(document)) == json.loads(json.dumps(document))


def test_a_document_is_indented_and_ascii():
    document = {"%s": 1, "100 %": {"%%": []}, 3: {"a": {}, "b": (0.5, None, True)}, "\u00e9": "\n NaN \U0001f600"}
    assert json_text(document) == json.dumps(document, indent=2)


def test_half_of_a_surrogate_pair_is_escaped():
    assert json_text({"a": "\udc80"}) == json.dumps({"a": "\udc80"}, indent=2)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_has_no_number_that_is_not_finite(number):
    for document in (number, [number], {"a": number}):
        with pytest.raises(ValueError, match=r"finite|compliant"):
            json_text(document)
