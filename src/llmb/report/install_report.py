# SPDX-License-Identifier: Apache-2.0
"""Steps of an installation, and the settings of a cluster."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmb.install.answers import OPTIONS, Answers
from llmb.install.environment import python_of
from llmb.install.images import ImportedImage
from llmb.install.installing import StepResult
from llmb.install.removal import Removal
from llmb.jobs.settings_in_effect import Setting, SettingsInEffect
from llmb.reference_suite.launch_scripts import CheckedFile
from llmb.report.table import Column, Table, result_table, table_of
from llmb.shown_text import printable

STATES = {"done": "done", "kept": "done before", "open": "to do"}
GB = 10**9


def install_document(
    answers: Answers,
    root: Path,
    results: Sequence[StepResult],
    jobs: Sequence[Mapping[str, Any]],
    commands: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """The JSON of ``llmb install``; its keys are a contract."""
    return {
        "status": "planned" if any(item.state == "open" for item in results) else "installed",
        "path": str(root),
        "python": str(python_of(answers, root)),
        "workloads": list(answers.workloads),
        "steps": [asdict(item) for item in results],
        "jobs": [dict(job) for job in jobs],
        "next": [command for _, command in commands],
    }


def removal_document(root: Path, removal: Removal) -> dict[str, Any]:
    """The JSON of ``llmb install --remove``; its keys are a contract."""
    return {"status": "removed", "path": str(root), "removed": list(removal.removed), "kept": list(removal.kept)}


def removal_plan_document(root: Path, paths: Sequence[str]) -> dict[str, Any]:
    """The JSON of ``llmb install --remove --dry-run``; its keys are a contract."""
    return {"status": "planned", "path": str(root), "would_remove": list(paths)}


def answers_table(answers: Answers) -> Table:
    """Every answer with the option that gives it."""
    table = result_table("Answers", "option", "value")
    for name, value in answers.document().items():
        text = ", ".join(value) if isinstance(value, list) else value
        if isinstance(value, dict):
            text = " ".join(f"{key}={item}" for key, item in value.items())
        table.add_row(OPTIONS[name].spelled if name in OPTIONS else name, printable(text))
    return table


def steps_table(root: Path, results: Sequence[StepResult]) -> Table:
    planned = any(item.state == "open" for item in results)
    columns: list[Column[StepResult]] = [
        Column("step", lambda item: item.name),
        Column("state", lambda item: STATES[item.state]),
        Column("result", lambda item: "" if item.state == "kept" else printable(item.text)),
    ]
    return table_of(f"{'Would install' if planned else 'Installed'} in {root}", results, columns)


def next_text(commands: Sequence[tuple[str, str]]) -> str:
    """Commands to copy, each below what it is for."""
    return "\n" + "".join(f"# {purpose}:\n{command}\n" for purpose, command in commands)


def removal_table(root: Path, removal: Removal) -> Table:
    table = result_table(f"Removed from {root}", "path", "state")
    for path in removal.removed:
        table.add_row(printable(path), "removed")
    for path in removal.kept:
        table.add_row(printable(path), "kept: changed since, or not empty")
    return table


def image_document(found: ImportedImage, runtime: str) -> dict[str, Any]:
    """The JSON of ``llmb prepare image``; its keys are a contract."""
    return {**asdict(found), "path": str(found.path), "runtime": runtime}


def image_text(found: ImportedImage, runtime: str) -> str:
    return (
        f"image   {printable(str(found.path))}\nsize    {found.bytes / GB:.3f} GB\n"
        f"\n# in cluster_config.yaml:\ncontainer:\n  runtime: {runtime}\n  image: {printable(str(found.path))}\n"
    )


SOURCES = {
    "option": "option",
    "shell": "shell",
    "user": "user default",
    "cluster": "",
    "catalogue": "catalogue,",
    "llmb": "llmb's",
}


def settings_document(found: SettingsInEffect) -> dict[str, Any]:
    """The JSON of ``llmb config show``; its keys are a contract."""
    return {
        "install_root": asdict(found.install_root),
        "files": [
            {
                "path": str(file.path),
                "reference_form": file.form.title if file.form else None,
                "not_taken": list(file.left_out),
            }
            for file in found.files
        ],
        "settings": [asdict(item) for item in found.settings],
        "variables": [asdict(item) for item in found.variables],
    }


def checked_document(checkout: Path, found: Sequence[CheckedFile]) -> dict[str, Any]:
    """The JSON of ``llmb config check``; its keys are a contract."""
    return {
        "path": str(checkout),
        "as_released": all(item.state == "as released" for item in found),
        "tag": found[0].script.tag,
        "files": [
            {
                "release": item.script.release,
                "workload": item.script.workload,
                "file": item.file,
                "state": item.state,
                "differs": list(item.differs),
            }
            for item in found
        ],
    }


def checked_table(found: Sequence[CheckedFile]) -> Table:
    """The files of a checkout beside their release, and what llmb relies on that differs."""
    table = result_table(f"Reference suite, beside {found[0].script.tag}", "recipe", "file", "state", "what differs")
    for item in found:
        recipe = f"{item.script.workload} {item.script.release}"
        table.add_row(recipe, item.file, item.state, "; ".join(map(printable, item.differs)))
    return table


def settings_tables(found: SettingsInEffect, *, defaults: bool) -> Iterator[Table]:
    """Without ``defaults``, what llmb does where nothing says otherwise is left out."""
    shown = [item for item in found.settings if defaults or item.source != "llmb"]
    yield _table("Settings", "setting", [found.install_root, *shown])
    if found.variables:
        yield _table("Variables of the workers", "variable", found.variables)


def _table(title: str, name: str, settings: "list[Setting] | tuple[Setting, ...]") -> Table:
    columns: list[Column[Setting]] = [
        Column(name, lambda item: item.key),
        Column("value", lambda item: item.value, value_text),
        Column("from", lambda item: f"{SOURCES[item.source]} {_short(item.place)}".strip()),
    ]
    return table_of(title, settings, columns)


def _short(place: str) -> str:
    """With the user's home as the shell writes it."""
    home = f"{Path.home()}/"
    return f"~/{place.removeprefix(home)}" if place.startswith(home) else place


def value_text(value: Any) -> str:  # noqa: ANN401 (a value of YAML)
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
