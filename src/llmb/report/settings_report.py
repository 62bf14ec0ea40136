# SPDX-License-Identifier: Apache-2.0
"""Settings with their sources, as tables and as a JSON document."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmb.jobs.settings_in_effect import Setting, SettingsInEffect
from llmb.report.table import Table, result_table

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


def settings_tables(found: SettingsInEffect, *, defaults: bool) -> Iterator[Table]:
    """Without ``defaults``, what llmb does where nothing says otherwise is left out."""
    shown = [item for item in found.settings if defaults or item.source != "llmb"]
    yield _table("Settings", "setting", [found.install_root, *shown])
    if found.variables:
        yield _table("Variables of the workers", "variable", found.variables)


def _table(title: str, name: str, settings: "list[Setting] | tuple[Setting, ...]") -> Table:
    table = result_table(title, name, "value", "from")
    for item in settings:
        table.add_row(item.key, value_text(item.value), f"{SOURCES[item.source]} {_short(item.place)}".strip())
    return table


def _short(place: str) -> str:
    """With the user's home as the shell writes it."""
    home = f"{Path.home()}/"
    return f"~/{place.removeprefix(home)}" if place.startswith(home) else place


def value_text(value: Any) -> str:  # noqa: ANN401 (a value of YAML)
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
