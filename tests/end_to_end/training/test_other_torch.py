# SPDX-License-Identifier: Apache-2.0
"""A torch that was never tried is named in the record and in the table of results, and so is what it lacks."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import llmb
from llmb.engine.torch_names import ACCOUNT, BENCH, ENGINE, FUSED, TRIED, WEIGHTS, missing_names, untried
from llmb.launch.local import run_workers
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.launch.ranks import words
from llmb.reports.run_report import run_table
from llmb.runs.experiment import create_run_folder
from llmb.runs.plan import Plan
from llmb.runs.record import new_record, write_record
from llmb.runs.result import Result

WORKER = Path(__file__).with_name("other_torch_worker.py")
SOURCES = [Path(llmb.__file__).parent / part for part in ("engine", "nodes/bench/worker")]
LISTED = (*ENGINE, *ACCOUNT, *WEIGHTS, *BENCH, *FUSED)
OF_PYTHON = {"_replace", "_fields", "_exit", "_current_frames", "_getframe"}
"""Of named tuples, and of the modules os and sys."""


def run_with(torch_is: str, python: str, plan: Plan, install: Path) -> Result:
    folder = create_run_folder(install, plan)
    kept = new_record(plan, (python, *words(1, 1), python, str(WORKER), str(folder.path)))
    write_record(folder, kept)
    exit_code = run_workers(kept.command, {"TORCH": torch_is, "OMP_NUM_THREADS": "1"}, folder, lambda: None)
    return finish_run(folder, kept, End(exit_code))


def test_a_version_that_was_never_tried_is_said(
    tmp_path: Path, tiny_plan: Callable[..., Plan], forked_python: str
) -> None:
    plan = tiny_plan(scale=1, steps=4)
    result = run_with("2.99.0", forked_python, plan, tmp_path)
    assert result.status == "success"
    said = "torch 2.99.0 has never been tested with this version of llmb, only 2.11 and 2.13"
    assert result.untried == said
    assert said in [row[-1] for row in run_table(plan, result).rows]


def test_what_a_version_lacks_ends_the_run_at_its_start(
    tmp_path: Path, tiny_plan: Callable[..., Plan], forked_python: str
) -> None:
    result = run_with("_CachedTorchDispatchMode", forked_python, tiny_plan(scale=1, steps=4), tmp_path)
    assert result.reason is not None
    lacks = f"torch {torch.__version__} lacks functions that llmb uses: torch.utils.checkpoint._CachedTorchDispatchMode"
    assert lacks in result.reason


def test_builds_of_versions_that_were_tried_are_tried() -> None:
    assert [untried(version) for version in ("2.11.0a0+eb65b36914.nv26.02", "2.13.0+cpu", *TRIED)] == [None] * 4
    assert untried("2.1.0") is not None


def test_every_private_name_is_listed_and_in_this_torch() -> None:
    used = {name for folder in SOURCES for file in folder.rglob("*.py") for name in private_names(file)}
    assert sorted(used - {part for name in LISTED for part in name.split(".")}) == []
    assert [name for name in LISTED if used.isdisjoint(name.split("."))] == []
    assert list(missing_names(LISTED)) == []


def private_names(file: Path) -> Iterator[str]:
    """The last part of what is private, or is imported from a private module."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom | ast.Import):
            above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [f"{above}{alias.name}" for alias in node.names]
            yield from (name.rpartition(".")[2] for name in names if name.startswith("torch.") and "._" in name)
        elif isinstance(node, ast.Attribute) and is_private(node):
            yield node.attr


def is_private(node: ast.Attribute) -> bool:
    own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return node.attr.startswith("_") and not node.attr.startswith("__") and not own and node.attr not in OF_PYTHON
