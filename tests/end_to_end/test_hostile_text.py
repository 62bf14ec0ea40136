# SPDX-License-Identifier: Apache-2.0
"""A terminal gets nothing from names, records and logs that it would obey; what is kept on disk holds no secret."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from recorded_runs import gpu_record, times_around, write_run

from llmb.base.errors import UsageError
from llmb.base.shown_text import printable, printable_lines
from llmb.cli.main import app, exit_code_of
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eteg\r[bold red]x[/]"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command writes to a terminal, without styles of its own."""
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: object) -> str:
        with monkeypatch.context() as patch:
            for stream in (sys.stdout, sys.stderr):
                patch.setattr(stream, "isatty", lambda: True)
            exit_code_of(app, [str(word) for word in words])
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def leaves(document: Any, *place: Any) -> Iterator[tuple[Any, ...]]:
    """The places of all texts in a document."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from leaves(value, *place, key)
        elif isinstance(value, str):
            yield (*place, key)


def made_hostile(document: dict[str, Any], shape: type[RunRecord]) -> int:
    """Adds escapes to every text of a record that may be any; how many these are."""
    count = 0
    for *above, last in list(leaves(document)):
        holder = document
        for key in above:
            holder = holder[key]
        before, holder[last] = holder[last], holder[last] + HOSTILE
        try:
            shape.model_validate(document)
            count += 1
        except ValidationError:
            holder[last] = before
    return count


@pytest.fixture
def hostile_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    parent = tmp_path / "workloads" / "pretrain_llama3.1" / "experiments" / f"x{HOSTILE.replace('/', '')}"
    path = write_run(parent, gpu_record(), times_around(12.3))
    document = json.loads((path / "run.json").read_text())
    assert made_hostile(document, RunRecord) > 40
    document["label"] = f"week{HOSTILE}"
    (path / "run.json").write_text(json.dumps(document))
    RunFolder(path).log.write_text(f"Training {HOSTILE}\nTraceback: {HOSTILE}\n")
    (path / "job.json").write_text(
        json.dumps({"job_id": "4711", "scheduler": "local", "submitted_at": "2026-11-20T10:00:00+00:00"})
    )
    return path


def test_no_command_sends_escapes_of_a_record_to_a_terminal(
    hostile_run: Path, tmp_path: Path, shown: Callable[..., str]
) -> None:
    again = write_run(hostile_run.parents[1], gpu_record(label="plain"), times_around(12.5))
    commands = [
        ("runs",),
        ("result", hostile_run),
        ("result", "latest"),
        ("judge", hostile_run, "--explain"),
        ("compare", hostile_run, again),
        ("parse", tmp_path, "--full-names"),
        ("parse", tmp_path, "--format", "csv"),
        ("watch", hostile_run, "--once"),
        ("jobs", "list"),
        ("jobs", "show", hostile_run),
        ("jobs", "log", hostile_run),
        ("result", f"no{HOSTILE}such"),
        ("show", f"w{HOSTILE}"),
        ("parse", tmp_path / f"none{HOSTILE}"),
    ]
    sent = {words[:2]: shown(*words) for words in commands}
    assert {words: OBEYED.findall(text) for words, text in sent.items() if OBEYED.search(text)} == {}
    assert sum("\\x1b]0;owned" in text for text in sent.values()) > 5, "it is shown"


def test_text_of_others_is_shown_as_it_is_written() -> None:
    assert printable("a\x1b[31m\tb\n\x9b\u202e") == "a\\x1b[31m\\x09b\\x0a\\x9b\\u202e"
    assert printable_lines("a\tb\r\nc\n") == "a\tb\\x0d\nc\n"
    assert str(UsageError("no \x1b[2J", where="a\x07b")) == "no \\x1b[2J\n  where: a\\x07b"
