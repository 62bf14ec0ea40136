# SPDX-License-Identifier: Apache-2.0
"""The order of an acceptance, what is kept of its parts, and what it concludes."""

import sys
from pathlib import Path
from typing import Any

import pytest

from llmb.base.errors import UsageError
from llmb.nodes.acceptance.acceptance import (
    RESULT,
    AcceptanceRequest,
    AcceptedNodes,
    Findings,
    Terms,
    answer,
    conclude,
    do_parts,
    open_acceptance,
)
from llmb.nodes.acceptance.parts import AcceptancePart, PartsFolder
from llmb.nodes.acceptance.recipe_choice import ChosenRecipe

FILES = (Path("page.html"), Path("runs.tar.gz"))
TERMS = Terms(minutes=30)
REQUEST = AcceptanceRequest(started_at="2026-11-29T00:00:00+00:00", label="accept-1", key="", nodes=())


def planned(place: AcceptedNodes, *recipes: ChosenRecipe, terms: Terms = TERMS) -> list[str]:
    parts = PartsFolder(None, Path("/nowhere"), sys.stderr.write, lambda _: None)
    do_parts(parts, REQUEST, place, lambda _: recipes, terms)
    return [one.command.removeprefix("llmb ") for one in parts.planned]


def test_a_machine_of_gpus_trains_on_all_of_them_in_each_dtype() -> None:
    recipe = ChosenRecipe("pretrain_llama3.1", "8b", ("bf16", "fp8"), 8, "h100", has_figure=True, run_s=1260)
    place = AcceptedNodes(subject="n1", host="n1", gpu_type="h100", per_node=8, visible=tuple("01234567"))
    assert planned(place, recipe) == [
        "doctor",
        "bench gpus",
        "bench memory --seconds 1",
        "bench collectives all_reduce --max-size 1GiB",
        "run -w pretrain_llama3.1 -s 8b --dtype bf16,fp8 --scale 8 --gpu-type h100 --repeats 1 --label accept-1",
        "judge accept-1",
    ]


def test_a_proxy_runs_on_each_gpu_alone() -> None:
    recipe = ChosenRecipe("pretrain_llama3.1", "8b", ("bf16",), 1, "h100")
    place = AcceptedNodes(subject="n1", host="n1", gpu_type="h100", per_node=2, visible=("4", "6"))
    labels = [command.rpartition(" ")[2] for command in planned(place, recipe) if command.startswith("run")]
    assert labels == ["accept-1-gpu0", "accept-1-gpu1"]


def test_nodes_are_checked_measured_paired_and_trained_on() -> None:
    recipe = ChosenRecipe("pretrain_llama3.1", "8b", ("bf16", "fp8"), 32, "h100", has_figure=True, run_s=60)
    nodes = ("n1", "n2", "n3", "n4")
    place = AcceptedNodes(
        subject="4 nodes", host="/x", gpu_type="h100", per_node=8, nodes=nodes, scheduler_words=("-p", "b")
    )
    where = "--nodes 4 --nodelist n1,n2,n3,n4 -p b"
    assert planned(place, recipe, terms=Terms(minutes=30, checks="gpu")) == [
        "doctor --nodes n1,n2,n3,n4 --only gpu -p b",
        f"bench gpus {where}",
        "jobs wait JOB",
        f"bench collectives --pairwise {where}",
        "jobs wait JOB",
        "submit -w pretrain_llama3.1 -s 8b --dtype bf16,fp8 --scale 32 --gpu-type h100 --repeats 3 --label accept-1"
        " -p b --nodelist n1,n2,n3,n4 --yes",
        "jobs wait JOBS",
        "judge accept-1",
    ]


def test_a_part_is_done_once_and_an_error_is_not_kept(tmp_path: Path) -> None:
    said: list[str] = []
    parts = PartsFolder(tmp_path, tmp_path, said.append, said.append)
    first = parts.do("catalogue", "list", "-w", "pretrain_llama3.1", seconds=1)
    assert first.document and first.exit_code == 0
    assert parts.do("catalogue", "list", "-w", "pretrain_llama3.1", seconds=1) == first
    assert [line for line in said if line.startswith("catalogue")] == ["catalogue: llmb list -w pretrain_llama3.1"]
    with pytest.raises(UsageError, match="unknown workload 'pretrain_lama'") as error:
        parts.do("wrong", "list", "-w", "pretrain_lama", seconds=1)
    assert error.value.where == "llmb list -w pretrain_lama"
    assert [path.name for path in tmp_path.iterdir()] == ["catalogue.json"]


def test_an_acceptance_without_a_result_is_continued_and_one_with_it_compared_with(tmp_path: Path) -> None:
    folder, request = open_acceptance(tmp_path, "a", (), start_new=False)
    assert open_acceptance(tmp_path, "a", (), start_new=False) == (folder, request)
    other, _ = open_acceptance(tmp_path, "b", (), start_new=False)
    assert other != folder
    assert open_acceptance(tmp_path, "a", (), start_new=True)[0] not in (folder, other)
    place = AcceptedNodes(subject="", host="", gpu_type=None, per_node=1)
    for name, status, before in (("change", "regressed", None), ("checks", "fail", folder.name)):
        findings = Findings({name: AcceptancePart(name=name, status=status, value="", training=name == "change")})
        (folder / RESULT).write_text(conclude(findings, place, request, 1, *FILES).model_dump_json())
        assert open_acceptance(tmp_path, "a", (), start_new=True)[1].before == before, "a slow one is no reference"
    (other / "request.json").write_text("")
    assert open_acceptance(tmp_path, "a", (), start_new=True)[1].before == folder.name, "a damaged one hinders none"


def row(status: Any, value: str = "x", reference: str | None = None) -> AcceptancePart:
    return AcceptancePart(name="part", status=status, value=value, reference=reference)


@pytest.mark.parametrize(
    ("rows", "verdict", "words"),
    [
        ([row("pass")], "inconclusive", "no figure to compare"),
        ([row("pass"), row("pass", "1 % faster", "published")], "pass", "as fast as it should be: part: 1 % faster"),
        ([row("inconclusive", "2 % slower"), row("pass", "1", "2")], "inconclusive", "inconclusive: part: 2 % slower"),
        ([row("regressed", "9 % slower"), row("inconclusive")], "regressed", "slower than it should be: part: 9 %"),
        ([row("regressed"), row("fail", "rank 3 is slow")], "fail", "not fit: part: rank 3 is slow"),
        ([row("invalid", "loss is nan"), row("pass", "1", "2")], "fail", "not fit: part: loss is nan"),
    ],
)
def test_the_worst_finding_decides(rows: list[AcceptancePart], verdict: str, words: str) -> None:
    found, sentence = answer(rows, "n1")
    assert (found, words in sentence, sentence.startswith("n1: ")) == (verdict, True, True)
