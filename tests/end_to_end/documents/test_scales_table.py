# SPDX-License-Identifier: Apache-2.0
"""The documents' tables of figures, a line for each scale; a command line without ``--release`` keeps its recipe."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from called_here import call_llmb
from typer.testing import CliRunner

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, all_scales, gpu_types_of, releases_of, sizes_of
from llmb.cli.main import app
from llmb.reports.recipe_report import scales_table
from llmb.reports.table import plain_lines

CATALOGUE = Catalogue()
PUBLISHED = [
    (name, size, release, gpu_type)
    for name, workload in CATALOGUE.workloads.items()
    for size in sizes_of(workload)
    for release in releases_of(workload, size)
    for gpu_type in gpu_types_of(workload, size)
]


def shown(*arguments: str) -> str:
    done = call_llmb("show", *arguments, "--all-scales")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_scale_has_its_published_figures() -> None:
    """25.04 Llama 3.1, lines 72-76."""
    text = shown("-w", "pretrain_llama3.1", "-s", "70b", "--dtype", "fp8", "--gpu-type", "h100")
    rows = [line.split() for line in text.splitlines()[3:9]]
    assert [row[0] for row in rows] == ["64", "128", "256", "512", "1024", "2048"]
    assert [row[7] for row in rows] == ["9.86", "9.95", "10.00", "10.07", "10.08", "10.15"]
    assert [row[8] for row in rows] == ["106,346", "210,769", "419,430", "833,030", "1,664,406", "3,305,855"]
    assert [row[9] for row in rows] == ["40.38", "40.02", "39.82", "39.54", "39.50", "39.23"]
    assert [row[10] for row in rows] == ["108.83", "54.91", "27.59", "13.89", "6.95", "3.50"]
    assert "v25.04 llama3.1/README.md" in text
    assert "line 72" in text


def test_a_proxy_has_no_time_to_train() -> None:
    """24.11, lines 65-71: the 32-, 96- and 192-GPU columns."""
    arguments = ("-w", "pretrain_llama3.1", "-s", "405b", "--release", "24.11", "--dtype", "fp8")
    scales = json.loads(shown(*arguments, "--json"))["scales"]
    published = [(row["scale"], row["proxy"], row["published"]) for row in scales]
    assert [(scale, proxy) for scale, proxy, _ in published] == [
        (1, True),
        (32, True),
        (96, True),
        (192, True),
        (576, False),
        (1152, False),
        (2304, False),
    ]
    figures = [figure and (figure["step_time_s"], figure["days_per_1t_tokens"]) for _, _, figure in published]
    assert figures == [None, (5.8, None), (5.71, None), (11.0, None), (11.24, 63.02), (11.31, 31.71), (12.35, 17.31)]
    assert scales[0]["published_reason"]
    assert shown(*arguments).count(" PROXY\n") == 4


def test_both_dtypes_are_shown_unless_one_is_named() -> None:
    text = shown("-w", "pretrain_nemotron4", "-s", "340b", "--gpu-type", "h100")
    assert [line for line in text.splitlines() if line.endswith("published figures")] == [
        "pretrain_nemotron4 340b bf16 on h100, published figures",
        "pretrain_nemotron4 340b fp8 on h100, published figures",
    ]


@pytest.mark.parametrize(("workload", "size", "release", "gpu_type"), PUBLISHED)
def test_every_table_fits_eighty_columns(workload: str, size: str, release: str, gpu_type: str) -> None:
    request = Request(workload=workload, size=size, release=release, gpu_type=gpu_type)
    for recipes in all_scales(CATALOGUE, request).values():
        table = scales_table(recipes)
        table.caption = None
        assert max(map(len, plain_lines(table))) <= 80
        assert len(table.rows) == len(recipes)


def test_a_scale_and_all_scales_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--all-scales and --scale cannot be combined"):
        all_scales(CATALOGUE, Request(workload="pretrain_llama3.1", size="8b", scale=8))
    with pytest.raises(UsageError, match="this recipe has no dtype 'fp9'"):
        all_scales(CATALOGUE, Request(workload="pretrain_llama3.1", size="8b", dtype="fp9"))


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
