# SPDX-License-Identifier: Apache-2.0
"""A run whose record cannot be true is invalid, and one whose record cannot be read is named: in every command that
reads runs, without a traceback, and without taking other runs along."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from tempfile import gettempdir
from typing import Any

import pytest
from called_here import call_llmb
from step_lines import step_line
from timed_runs import fail, noisy_times, write_run

from llmb.jobs.history import jobs_of_folders
from llmb.runs.folder import BrokenRecord, RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import read_record, short_id
from llmb.runs.steps import Step, read_steps, step_to_json

START_S = datetime(2026, 11, 1, 12, tzinfo=UTC).timestamp()
Change = Callable[[RunFolder], None]


def steps_of(change: Callable[[list[Step]], list[Step]]) -> Change:
    def write(folder: RunFolder) -> None:
        changed = change(read_steps(folder.steps))
        folder.steps.write_text("".join(f"{step_to_json(step)}\n" for step in changed))

    return write


def each(**values: Any) -> Change:
    """Of step 40, which is in the window."""
    return steps_of(lambda steps: [replace(step, **values) if step.step == 40 else step for step in steps])


def clocked(seconds: float) -> Change:
    """By the clock, every step took as long."""
    return steps_of(lambda steps: [replace(step, ended_s=START_S + seconds * step.step, pause_s=0.0) for step in steps])


def record_of(**values: Any) -> Change:
    """Values of the record, by dotted keys with two underscores."""

    def write(folder: RunFolder) -> None:
        record = json.loads(folder.record.read_text())
        for key, value in values.items():
            *above, last = key.split("__")
            part = record
            for name in above:
                part = part[name]
            part[last] = value
        folder.record.write_text(json.dumps(record))

    return write


def text_of(change: Callable[[str], str], name: str = "record") -> Change:
    def write(folder: RunFolder) -> None:
        path = getattr(folder, name)
        path.write_text(change(path.read_text()))

    return write


def sparse(name: str) -> Change:
    def write(folder: RunFolder) -> None:
        with getattr(folder, name).open("r+b") as stream:
            stream.truncate(2 << 30)

    return write


def a_folder(folder: RunFolder) -> None:
    folder.record.unlink()
    folder.record.mkdir()


ENDED = (datetime(2026, 11, 1, 12, 2, tzinfo=UTC) + timedelta(seconds=20)).isoformat()
CONTRADICTING: dict[str, tuple[Change, str]] = {
    "not updated": (each(updated=False), "1 step of the window skipped the update of the parameters"),
    "zero": (each(step_time_s=0.0), "step 40 took 0 s, which is impossible"),
    "negative": (each(step_time_s=-2.0), "step 40 took -2 s"),
    "not a number": (each(step_time_s=math.nan), "step 40 took nan s"),
    "infinite": (each(step_time_s=math.inf), "step 40 took inf s"),
    "huge": (each(step_time_s=1e308), "step 40 took 1e+308 s"),
    "longer than the clock": (clocked(1.0), "step times of the window sum to"),
    "shorter than the clock": (clocked(20.0), "but 20 s by the clock"),
    "longer than the run": (record_of(ended_at=ENDED), "but the run lasted 20 s"),
    "ended before it began": (record_of(ended_at="2026-11-01T11:00:00+00:00"), "s before it began"),
    "profiled without a profile": (each(profiled=True), "step 40 was profiled, contrary to the plan"),
    "window upside down": (record_of(plan__window__first=44, plan__window__last=35), "the window is steps 44-35"),
    "window outside": (record_of(plan__window__last=99), "but the run has steps 0-49"),
    "other ranks": (record_of(environment__ranks_per_node={"node1": 16}), "16 in the environment"),
    "twice": (steps_of(lambda steps: [*steps[:-2], steps[-3], steps[-1]]), "step 47 was written twice"),
    "missing": (steps_of(lambda steps: [*steps[:7], *steps[8:], steps[-1]]), "step 7 is missing"),
    "backwards": (steps_of(lambda steps: [*steps[:-2], steps[-1], steps[-2]]), "step 48 is missing"),
    "other numbers": (steps_of(lambda old: [replace(one, step=one.step + 9) for one in old]), "step 50 is recorded"),
    "other tokens": (each(padded_tokens=8), "step 40 has 8 tokens, but the layout has"),
    "loss": (each(loss=math.nan), "step 40: loss nan"),
    "gradient": (each(grad_norm=math.inf), "gradient norm inf"),
    "another mean": (record_of(result__step_time_s__mean=1.0), "but its result has 1 s"),
    "another rate": (record_of(result__tokens_per_s=1.0), "its result has 1 tokens/s, but"),
    "another status": (record_of(result__status="failed"), "its status is success, but its result is failed"),
    "no result": (record_of(result=None), "its status is success, but it has no result"),
    "too few steps": (steps_of(lambda steps: steps[:20]), "20"),
}
DAMAGED: dict[str, tuple[Change, str]] = {
    "truncated": (text_of(lambda text: text[:500]), "it is damaged"),
    "empty": (text_of(lambda _: ""), "it is damaged"),
    "another type": (record_of(plan__steps="many"), "plan"),
    "huge number": (record_of(plan__steps=10**400), "plan"),
    "no tensor parallel rank": (record_of(plan__recipe__layout__tp=0), "layout.tp: Input should be greater than"),
    "more ranks than GPUs": (record_of(plan__recipe__layout__pp=16), "too small for the parallel sizes"),
    "float": (record_of(plan__window__first=1e308), "plan"),
    "nested": (text_of(lambda _: "[" * 100_000), "it is damaged"),
    "large": (sparse("record"), "MiB"),
    "folder": (a_folder, "is a directory"),
    "large steps": (sparse("steps"), "MiB"),
    "nested steps": (text_of(lambda text: "[" * 100_000 + "\n" + text, "steps"), "the line is damaged or incomplete"),
    "time": (record_of(started_at="tomorrow"), "started_at: Value error, 'tomorrow' is not a time"),
    "status": (record_of(status="done"), "it is damaged: status"),
    "binary steps": (lambda folder: folder.steps.write_bytes(b"\xff\x00\n{}\n"), "the line is damaged or incomplete"),
    "folder of steps": (lambda folder: (folder.steps.unlink(), folder.steps.mkdir()), "is a directory"),
    "other steps": (text_of(lambda text: text.replace('"loss": 9', '"loss": {}'), "steps"), "damaged or incomplete"),
}


@pytest.fixture
def bad(
    tmp_path: Path, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> RunFolder:
    """A run beside a good one of the same label; its window may be a parameter."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    plan = tiny_plan(steps=50, window=getattr(request, "param", "35-44"))
    folders = [
        write_run(tmp_path, plan, noisy_times(2.0, 0.01, 50, number), number=number, label="same") for number in (1, 2)
    ]
    for folder in folders:
        steps = read_steps(folder.steps)
        folder.log.write_text(
            "".join(
                step_line(step.step, plan.steps, loss=step.loss, step_time_s=step.step_time_s, tflops_per_gpu=None)
                for step in steps
            )
        )
    return folders[1]


def called(*words: object) -> str:
    """What a command prints, with its error. It never ends in a traceback."""
    done = call_llmb(*words)
    return done.stdout + done.stderr


def commands(folder: RunFolder) -> dict[str, str]:
    root = folder.path.parents[5]
    good = next(path for path in root.rglob("*/run.json") if path.parent != folder.path).parent
    return {
        "result": called("result", folder.path, "--json"),
        "parse": called("parse", root, "--json"),
        "judge": called("judge", root, "--json"),
        "judge against": called("judge", good, "--against", root, "--json"),
        "compare": called("compare", root, good, "--json"),
        "label": called("compare", "same", "label:same", "--vary", "dtype", "--json"),
    }


@pytest.mark.parametrize("kind", CONTRADICTING)
def test_a_record_that_contradicts_itself_is_invalid_and_says_why(bad: RunFolder, kind: str) -> None:
    change, reason = CONTRADICTING[kind]
    change(bad)
    for command, text in commands(bad).items():
        assert reason in text, (command, text[-3000:])
        assert command == "result" or any(key in text for key in ('"status": "success"', '"rows"', '"judged"')), command


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_record_that_cannot_be_read_is_named_and_takes_no_other_run_along(bad: RunFolder, kind: str) -> None:
    change, reason = DAMAGED[kind]
    change(bad)
    found = commands(bad)
    if kind not in ("huge number", "large steps"):  # it may be watched: the steps are read as they come
        found["watch"] = called("watch", bad.path)
    for command, text in found.items():
        if command == "parse" and bad.log.is_file():
            continue  # the log has the run's steps
        assert reason in text, (command, text[-3000:])
    assert kind == "huge number" or f"llmb parse {bad.log}" in found["result"], "what is left of it"


def test_the_run_before_does_not_silently_stand_for_a_damaged_one(bad: RunFolder) -> None:
    bad.record.write_text("{")
    assert f"newer ones: {bad.path}: its record cannot be read: it is damaged" in called("judge", "latest")


def test_runs_of_a_root_are_listed_whatever_their_records_hold(bad: RunFolder) -> None:
    root = bad.path.parents[5]
    job = {"job_id": "1", "scheduler": "local", "submitted_at": "2026-11-01T12:00:00+00:00"}
    for folder in (path.parent for path in root.rglob("*/run.json")):
        RunFolder(folder).job.write_text(json.dumps(job | {"key": folder.parent.name}))
    text = bad.record.read_text()
    for change in (change for kind, (change, _) in DAMAGED.items() if "steps" not in kind):
        change(bad)
        assert len(list(jobs_of_folders(root))) >= 1
        if bad.record.is_dir():
            bad.record.rmdir()
        bad.record.write_text(text)


Place = tuple[str | int, ...]
WRONG: tuple[Any, ...] = (0, -1, None, "", 10**400, 1e308, [], {})


def places(value: object, above: Place = ()) -> Iterator[Place]:
    """Of every value in a document, nested ones included."""
    if above:
        yield above
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*above, key))


def changed_at(document: dict[str, Any], place: Place, value: object) -> str:
    changed = json.loads(json.dumps(document))
    part = changed
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    return json.dumps(changed)


def expect_the_good_run(bad: RunFolder, exported: Path, what: str, *, every: bool = True) -> None:
    """The commands that read many runs have the run beside the bad one; not ``every`` command, but those that use most
    of a record."""
    root = bad.path.parents[5]
    good = next(path for path in root.rglob("*/run.json") if path.parent != bad.path).parent
    name = short_id(json.loads((good / "run.json").read_text())["run_id"])
    shutil.rmtree(exported, ignore_errors=True)
    for command, words, expected in (
        ("judge", ("--json",), name),
        ("report", ("--format", "md"), "| recipe |"),
        ("export", ("-o", exported), "results.csv"),
    ):
        text = called(command, root / "workloads", *words)
        assert expected in text, (what, command, text)
    assert name in (exported / "results.csv").read_text(), what
    if not every:
        return
    assert good.name in called("parse", root / "workloads", "--json")
    called("archive", root / "workloads", "-o", exported / "runs.tar.zst")
    assert (exported / "runs.tar.zst").exists(), what
    for command, *words in (("compare", root, good, "--json"), ("runs",), ("jobs", "list"), ("watch", bad.path)):
        called(command, *words)


@pytest.mark.parametrize("size", ["tp", "gbs"])
def test_a_size_of_zero_takes_no_other_run_along(bad: RunFolder, tmp_path: Path, size: str) -> None:
    record_of(**{f"plan__recipe__layout__{size}": 0})(bad)
    expect_the_good_run(bad, tmp_path / "exported", size)


@pytest.mark.measured
@pytest.mark.parametrize("part", ["", "plan", "environment", "settings", "result"])
def test_no_value_of_a_record_ends_a_command_or_takes_a_run_along(bad: RunFolder, tmp_path: Path, part: str) -> None:
    document = json.loads(bad.record.read_text())
    seen: set[str] = set()
    for place in places(document):
        if place[0] != part and (part or isinstance(document[place[0]], dict)):
            continue
        for value in WRONG:
            bad.record.write_text(changed_at(document, place, value))
            try:
                read_record(bad)
            except BrokenRecord as error:
                why = error.what.rpartition(": ")[2]
                if why in seen:
                    continue  # commands see the same of every place
                seen.add(why)
            expect_the_good_run(bad, tmp_path / "exported", f"{place} {value!r:.20}", every=False)


@contextmanager
def without_permission(folder: Path, root: Path) -> Iterator[None]:
    """Nobody may look into a folder; the administrator, whom permissions do not bind, becomes another user."""
    temporary = [path for path in (root, *root.parents) if Path(gettempdir()) in path.parents]
    above = [] if os.geteuid() else [path for path in temporary if path.stat().st_mode & 0o77 == 0]
    for path in above:
        path.chmod(0o711)
    own = os.geteuid()
    mode = folder.stat().st_mode
    folder.chmod(0)
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)
        folder.chmod(mode)
        for path in above:
            path.chmod(0o700)


@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_without_permission_is_named(bad: RunFolder, tmp_path: Path, level: int) -> None:
    folder, workloads = (bad.path, bad.path.parent)[level], bad.path.parents[4]
    words = {name: (name, bad.path / "log") for name in ("watch", "result", "judge", "parse", "trace", "nccl")}
    for each_of in (("judge", workloads, "--json"), *words.values()):
        called(*each_of)  # loads the modules, which another user may not read
    with without_permission(folder, tmp_path):
        judged = called("judge", workloads, "--json")
        assert "Permission denied" in judged and str(folder) in judged and '"judged"' in judged
        for command, called_with in words.items():
            assert "cannot be read: Permission denied" in called(*called_with), command


@pytest.mark.measured
@pytest.mark.parametrize("name", ["record", "steps", "log", "job", "rank_times", "environment"])
def test_no_state_of_a_file_ends_a_command_or_takes_a_run_along(bad: RunFolder, tmp_path: Path, name: str) -> None:
    path: Path = getattr(bad, name)
    text = path.read_bytes() if path.exists() else b""
    for content in (text[: len(text) // 2], b"", b"\xff\x00" * 50, b"[]", b"null\n", None):
        path.unlink(missing_ok=True)
        path.mkdir() if content is None else path.write_bytes(content)
        expect_the_good_run(bad, tmp_path / "exported", f"{name} {content!r:.20}")


def json_of(*words: object) -> dict[str, Any]:
    """The answer alone, without what is said beside it."""
    return call_llmb(*words, "--json").document


def answers(folder: RunFolder) -> dict[str, Any]:
    good = next(path for path in folder.path.parents[5].rglob("*/run.json") if path.parent != folder.path).parent
    called_with = {
        "parse": (folder.log,),
        "result": (folder.path,),
        "judge": (folder.path, "--against", good),
        "compare": (good, folder.path),
        "watch": (folder.path,),
    }
    return {command: json_of(command, *words) for command, words in called_with.items()}


@pytest.mark.parametrize(("bad", "first", "last"), [("35-44", 35, 44), ("20-29", 20, 29)], indirect=["bad"])
def test_every_command_has_the_same_window_and_step_time(bad: RunFolder, first: int, last: int) -> None:
    found = answers(bad)
    (parsed,) = found["parse"]["results"]
    (judged,) = found["judge"]["judged"]
    (row,) = found["compare"]["rows"]
    mean = fmean(step.step_time_s for step in read_steps(bad.steps)[first : last + 1])
    times = [
        parsed["step_time_s"]["mean"],
        found["result"]["step_time_s"]["mean"],
        judged["step_time_s"],
        row["after_s"],
    ]
    assert times == pytest.approx([mean] * 4, rel=1e-12)
    assert (parsed["window"]["first"], parsed["window"]["last"]) == (first, last)
    assert [parsed["status"], found["result"]["status"], found["watch"]["state"]] == ["success", "success", "ended"]


def test_a_run_that_failed_after_its_last_step_measures_nothing_in_any_command(bad: RunFolder) -> None:
    why = "the workers ended with exit code 3"
    fail(bad, why)
    (parsed,) = json_of("parse", bad.log)["results"]
    assert (parsed["status"], parsed["step_time_s"]) == ("incomplete", None)
    assert parsed["reason"] == f"the recorded status is failed: {why}"
    assert why in called("judge", bad.path, "--json")
    assert why in called("compare", bad.path, bad.path, "--json")
    assert json_of("result", bad.path)["status"] == "failed"
