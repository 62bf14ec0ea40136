# SPDX-License-Identifier: Apache-2.0
"""The recipe of a command line without ``--release`` does not change unnoticed.

``frozen_recipes.tsv`` has command lines as README and the documents have them; ``test_command_lines.py`` says how the
call of a launch script is written.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llmb.cli.main import app

TABLE = Path(__file__).parent / "frozen_recipes.tsv"
ROWS = [tuple(line.split("\t")) for line in TABLE.read_text().splitlines()]
FACTS = ("workload", "size", "dtype", "gpu_type", "scale", "release", "proxy")
SIZES = ("tp", "pp", "vp", "cp", "ep", "etp", "mbs", "gbs", "seq_len", "layers")
QUEUED = {"run", "submit", "single", "launch"}


def recipe_of(command: str, root: Path) -> str:
    words = shlex.split(command)
    first = next(number for number, word in enumerate(words) if "=" not in word)
    variables, called = dict(word.split("=", 1) for word in words[:first]), words[first + 1 :]
    dry = ["--dry-run"] if called[0] in QUEUED else []
    environment = {"LLMB_INSTALL": str(root), "CUDA_VISIBLE_DEVICES": "", **variables}
    result = CliRunner().invoke(app, [*called, *dry, "--json"], env=environment)
    assert result.exception is None, result.exception
    return facts_of(json.loads(result.stdout))


def facts_of(document: dict[str, Any]) -> str:
    recipe = document["recipe"]
    planned = document["plan"]["recipe"]["layout"] if "plan" in document else document.get("layout")
    layout = planned or document.get("recipe_layout") or {}
    facts = [f"{name}={recipe[name]}" for name in FACTS]
    return " ".join([*facts, *(f"{name}={layout[name]}" for name in SIZES if name in layout)])


@pytest.mark.parametrize(("command", "recipe"), ROWS, ids=[command for command, _ in ROWS])
def test_a_command_line_stands_for_the_recipe_of_before(command: str, recipe: str, tmp_path: Path) -> None:
    assert recipe_of(command, tmp_path) == recipe
