# SPDX-License-Identifier: Apache-2.0
"""Who meets whom in pairwise measurements, and which nodes they convict, in simulated clusters."""

import json
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from shown_tables import shown_lines

from llmb.cli.main import app, exit_code_of
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.nodes.bench.pair_rounds import expected_s, limit_s, read_rounds, schedule
from llmb.nodes.bench.pairs import (
    NodeReading,
    NodeVerdict,
    PairFigures,
    PairJob,
    PairReading,
    PairwiseResult,
    Readings,
    decide,
    group_notes,
    members,
    pair_rule,
    rounds,
)
from llmb.reports.bench_report import pairs_document, pairs_tables
from llmb.reports.output import json_text

RULE = pair_rule("cuda")
HUNG = "it did not end within 90 s and was killed"
SIZES = (3, 4, 5, 8, 16, 33, 64)


def cluster(
    nodes: int,
    draw: random.Random,
    *,
    noise: float = 0.02,
    speed: Mapping[int, float] | None = None,
    alone: Mapping[int, float] | None = None,
    hung: Collection[int] = (),
    path: Callable[[int, int], float] = lambda _first, _second: 1.0,
) -> Readings:
    """What nodes of a network measure, where a pair is as fast as the slower one, and as the path between them.

    speed: of the node's network; alone: of its products. Nodes that are ``hung`` do so alone, and meet nobody.
    """
    own = {}
    for node in range(nodes):
        tflops = 700 * draw.gauss(1, noise) * (alone or {}).get(node, 1)
        figures = PairFigures(tflops=tflops, gb_per_s=400 * draw.gauss(1, noise))
        own[node] = NodeReading(node=node, problem=HUNG) if node in hung else NodeReading(node=node, figures=figures)
    pairs = []
    for number, round_ in enumerate(rounds(nodes), 1):
        for first, second in round_.pairs:
            share = min((speed or {}).get(node, 1) for node in (first, second)) * path(first, second)
            latency_s = 30e-6 / share * (1 + abs(draw.gauss(0, 3 * noise)))
            figures = PairFigures(gb_per_s=45 * share * draw.gauss(1, noise), latency_s=latency_s)
            if not {first, second} & {*hung}:
                pairs.append(
                    PairReading(first=first, second=second, round=number, far=round_.far, figures=figures, problem=None)
                )
    return Readings([f"n{node}" for node in range(nodes)], own, pairs)


def verdict(readings: Readings) -> tuple[set[int], set[int], list[str]]:
    """Unfit and undecided nodes, and the notes."""
    verdicts, notes = decide(readings, RULE)
    places = {fit: {node for node, one in enumerate(verdicts) if one.fit is fit} for fit in (False, None)}
    return places[False], places[None], notes


@pytest.mark.parametrize("nodes", [2, *SIZES, 7, 256, 257])
def test_every_node_meets_three_others_in_rounds_of_disjoint_pairs(nodes: int) -> None:
    schedule = rounds(nodes)
    for round_ in schedule:
        meeting = [node for pair in round_.pairs for node in pair]
        assert len(set(meeting)) == len(meeting)
        assert {round_.partner(node) is None for node in set(range(nodes)) - {*meeting}} <= {True}
    pairs = [pair for round_ in schedule for pair in round_.pairs]
    assert len({*pairs}) == len(pairs), "no pair meets twice"
    assert all(first < second for first, second in pairs)
    if nodes < 5:
        assert {*pairs} == {*combinations(range(nodes), 2)}
    for node in range(nodes):
        assert sum(node in pair for pair in pairs) >= min(3, nodes - 1)
    assert len(schedule) <= 4


def test_the_time_is_known_before() -> None:
    assert [round(expected_s(nodes, 8)) for nodes in (8, 64, 256)] == [124, 129, 149]
    assert [round(limit_s(nodes, 8)) for nodes in (8, 64, 256)] == [754, 782, 878]


def test_the_batch_script_reads_who_measures_when() -> None:
    product, pairs = "llmb.nodes.bench.worker.every_gpu", "llmb.nodes.bench.worker.collective_timing"
    assert schedule(4, 8).splitlines() == [
        f"120 {product} alone-0:0 alone-1:1 alone-2:2 alone-3:3",
        f"90 {pairs} within-0:0 within-1:1 within-2:2 within-3:3",
        f"90 {pairs} round-1-0-1:0,1 round-1-2-3:2,3",
        f"90 {pairs} round-2-1-2:1,2 round-2-0-3:0,3",
        f"90 {pairs} round-3-0-2:0,2 round-3-1-3:1,3",
        f"92 {pairs} group:",
    ]
    assert "within" not in schedule(4, 1)


@pytest.mark.parametrize("nodes", SIZES)
def test_equal_nodes_are_fit(nodes: int) -> None:
    draw = random.Random(7)
    assert {str(verdict(cluster(nodes, draw))) for _ in range(200 if nodes < 33 else 40)} == {str((set(), set(), []))}


@pytest.mark.parametrize("nodes", SIZES)
def test_a_slow_node_is_convicted_and_none_of_its_partners(nodes: int) -> None:
    draw = random.Random(7)
    for _ in range(20):
        bad = draw.randrange(nodes)
        assert verdict(cluster(nodes, draw, speed={bad: 0.7}))[0] == {bad}
        slow_gpu = 0.7 if nodes >= 8 else 0.45  # few nodes tell little of how they scatter
        unfit, undecided, _ = verdict(cluster(nodes, draw, alone={bad: slow_gpu}))
        assert (unfit, undecided) == ({bad}, set()), "with a network as fast as any"


@pytest.mark.parametrize("nodes", [4, 5, 8, 64])
def test_one_that_hangs_and_one_that_is_slow_are_both_convicted(nodes: int) -> None:
    draw = random.Random(7)
    for hung, slow in [*combinations(range(nodes), 2)][:10]:
        unfit, undecided, notes = verdict(cluster(nodes, draw, hung=[hung], speed={slow: 0.5}))
        assert (unfit, undecided, notes) == ({hung, slow}, set(), [])


def test_a_node_that_hangs_in_all_of_its_pairs_is_convicted() -> None:
    readings = cluster(8, random.Random(7))
    lost = [
        pair.model_copy(update={"figures": PairFigures(), "problem": HUNG}) if pair.has([3]) else pair
        for pair in readings.pairs
    ]
    verdicts, _ = decide(replace(readings, pairs=lost), RULE)
    assert {one.node: len(one.evidence) for one in verdicts if one.fit is not True} == {"n3": 3}


def test_of_eight_nodes_any_two_that_are_slow_are_convicted() -> None:
    draw = random.Random(7)
    for pair in combinations(range(8), 2):
        assert verdict(cluster(8, draw, speed=dict.fromkeys(pair, 0.6))) == ({*pair}, set(), [])


def step(folder: Path, name: str, code: str | None, log: str = "") -> None:
    path = folder / "rounds" / name
    path.mkdir(parents=True)
    (path / "log").write_text(log)
    if code is not None:
        (path / "code").write_text(f"{code}\n")


def test_what_came_of_a_step_is_read_from_its_folder(tmp_path: Path) -> None:
    for name, code, log in (
        ("alone-0", "0", ""),
        ("alone-1", "1", "RuntimeError: CUDA error: uncorrectable ECC error\nllmb: rank 0 failed\n"),
        ("alone-2", "137", ""),
        ("alone-3", None, ""),
        ("round-2-0-3", "0", ""),
        ("group", "7", ""),
    ):
        step(tmp_path, name, code, log)
    (tmp_path / "rounds" / "alone-0" / "gpus").mkdir()
    found = read_rounds(tmp_path, PairJob(device="cuda", nodes=5, per_node=1), [f"n{node}" for node in range(5)])
    assert {node: one.problem for node, one in found.alone.items()} == {
        0: None,
        1: "RuntimeError: CUDA error: uncorrectable ECC error",
        2: "it did not end within 120 s and was killed",
        3: "no result",
    }
    assert found.group == (PairFigures(), "exit code 7")
    verdicts, notes = decide(found, RULE)
    evidence = {one.node: one.evidence for one in verdicts}
    assert evidence["n4"] == ("alone: no result",)
    assert evidence["n1"] == ("alone: RuntimeError: CUDA error: uncorrectable ECC error",)
    assert any("the software or settings may be the cause" in note for note in notes), "four of five"


@pytest.mark.parametrize("nodes", [4, 8, 16, 33, 64])
def test_half_of_the_cluster_is_not_convicted_but_said(nodes: int) -> None:
    half = range(nodes // 2)
    for bad in (dict.fromkeys(half, 0.6), {2 * node: 0.6 for node in half}):
        unfit, _, notes = verdict(cluster(nodes, random.Random(7), speed=bad))
        assert not unfit
        assert any("the network" in note for note in notes)
    unfit, undecided, notes = verdict(cluster(nodes, random.Random(7), hung=range(nodes // 2 + 1)))
    assert not unfit
    assert len(undecided) > nodes // 2
    assert any("the software or settings may be the cause" in note for note in notes)


@pytest.mark.parametrize("nodes", [8, 16, 33, 64])
def test_a_slow_switch_between_two_halves_is_no_fault_of_nodes(nodes: int) -> None:
    def path(first: int, second: int) -> float:
        return 0.5 if (first < nodes // 2) != (second < nodes // 2) else 1.0

    unfit, undecided, notes = verdict(cluster(nodes, random.Random(7), path=path))
    assert (unfit, undecided) == (set(), set())
    assert any("the path between them may be slow" in note for note in notes)


def test_one_slow_path_is_named_as_such() -> None:
    unfit, undecided, notes = verdict(cluster(8, random.Random(7), path=lambda *pair: 0.4 if pair == (2, 3) else 1.0))
    assert (unfit, undecided) == (set(), set())
    assert notes[0].startswith("n2 with n3: ")
    assert notes[0].endswith("both are fine with others, so the path between them may be slow")


def test_too_few_are_not_compared() -> None:
    unfit, undecided, _ = verdict(cluster(3, random.Random(7), hung=[2]))
    assert (unfit, undecided) == ({2}, {0, 1})


def test_the_group_is_that_of_the_fit_nodes_and_its_faults_convict_none() -> None:
    readings = cluster(8, random.Random(7), speed={3: 0.5})
    verdicts, _ = decide(readings, RULE)
    group = members(verdicts)
    assert group == (0, 1, 2, 4, 5, 6, 7)

    def notes(figures: PairFigures, problem: str | None = None) -> list[str]:
        return [*group_notes(replace(readings, group=(figures, problem)), group, RULE)]

    assert notes(PairFigures(gb_per_s=44)) == []
    assert "are slower together than in pairs: 20 GB/s" in notes(PairFigures(gb_per_s=20))[0]
    assert HUNG in notes(PairFigures(), HUNG)[0]
    assert "the group was not measured" in next(iter(group_notes(readings, group, RULE)))
    assert members([NodeVerdict(node="a", fit=True), NodeVerdict(node="b", fit=None)]) == ()


def test_the_table_has_the_worst_first_and_the_lists_below() -> None:
    readings = cluster(8, random.Random(7), speed={3: 0.5}, hung=[6])
    verdicts, notes = decide(readings, RULE)
    alone = tuple(readings.alone.values())
    times = {"expected_s": expected_s(8, 1), "limit_s": limit_s(8, 1), "took_s": 200.0}
    parts = {"nodes": tuple(verdicts), "notes": tuple(notes), "alone": alone, "pairs": tuple(readings.pairs)}
    result = PairwiseResult(started_at="2026-01-01T00:00:00+00:00", group=PairFigures(gb_per_s=44.0), **times, **parts)
    host_list = find_scheduler("slurm").host_list
    lines = shown_lines(pairs_tables(result, host_list))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert text.index("n3 ") < text.index("n6 ") < text.index("n0 ")
    assert "UNFIT" in text and "with n2: " in text and "All 6 fit nodes at once: 44 GB/s" in text
    assert "llmb submit --exclude unfit, or --exclude n[3,6]" in " ".join(text.split())
    document = json.loads(json_text(pairs_document(result, host_list)))
    assert document["unfit_nodes"] == "n[3,6]"
    assert document["nodes"][6] == {"node": "n6", "fit": False, "evidence": [f"alone: {HUNG}"]}
    assert {*document["pairs"][0]} == {"nodes", "round", "tflops", "gb_per_s", "latency_s", "problem"}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ((), "--pairwise requires the nodes of a job"),
        (("--nodes", "2"), "--pairwise needs 3 nodes"),
        (
            ("--nodes", "8", "all_reduce", "--max-size", "1GiB"),
            "--pairwise cannot be combined with COLLECTIVE, --max-size",
        ),
    ],
)
def test_what_cannot_be_measured_in_pairs_is_a_mistake(
    options: tuple[str, ...],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    (tmp_path / "cluster_config.yaml").write_text("gpu_type: h100\n")
    assert exit_code_of(app, ["bench", "collectives", "--pairwise", *options]) == 2
    assert what in capsys.readouterr().err


def test_the_job_starts_steps_on_the_nodes_of_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    (tmp_path / "cluster_config.yaml").write_text("gpu_type: h100\n")
    assert exit_code_of(app, ["bench", "collectives", "--pairwise", "--nodes", "64", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "64 nodes: about 2 min 9 s from the start of the job, at most 13 min 2 s if nodes hang" in err
    assert {"#SBATCH --no-kill", "#SBATCH --time=00:15:00", "#SBATCH --nodes=64"} <= {*out.splitlines()}
    assert 'srun --nodelist="$nodes" --nodes="$count" --ntasks="$count" --ntasks-per-node=1' in out
    assert '-m llmb.launch.ranks "$count" 8 ' in out
