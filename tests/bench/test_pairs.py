# SPDX-License-Identifier: Apache-2.0
"""Who meets whom in pairwise measurements, and which nodes they convict, in simulated clusters."""

import random
from collections.abc import Callable, Collection, Mapping
from itertools import combinations
from pathlib import Path

import pytest
from shown_tables import shown_lines

from llmb.bench.pair_agent import PairFiles
from llmb.bench.pair_verdict import Readings, decide, group_notes, members, pair_rule
from llmb.bench.pairs import (
    ALONE,
    GROUP,
    Members,
    NodeReading,
    NodeVerdict,
    PairFigures,
    PairwiseResult,
    deadlines,
    expected_s,
    limit_s,
    read_pairs,
    rounds,
)
from llmb.cli.main import app, exit_code_of
from llmb.report.bench_report import pairs_document, pairs_tables
from llmb.schedulers.lookup import find_scheduler

RULE = pair_rule("cuda")
HUNG = "it was not done within 90 s, and was killed"
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

    speed: of the node's network; alone: of its products. Nodes that are ``hung`` write nothing.
    """
    found = {}
    for node in set(range(nodes)) - set(hung):
        tflops = 700 * draw.gauss(1, noise) * (alone or {}).get(node, 1)
        figures = PairFigures(tflops=tflops, gb_per_s=400 * draw.gauss(1, noise))
        found[ALONE, node] = NodeReading(measurement=ALONE, node=node, figures=figures)
    for number, round_ in enumerate(rounds(nodes), 1):
        for pair in round_.pairs:
            share = min((speed or {}).get(node, 1) for node in pair) * path(*pair)
            latency_s = 30e-6 / share * (1 + abs(draw.gauss(0, 3 * noise)))
            figures = PairFigures(gb_per_s=45 * share * draw.gauss(1, noise), latency_s=latency_s)
            lost = any(node in hung for node in pair)
            for node in set(pair) - set(hung):
                own = figures if node == pair[0] and not lost else PairFigures()
                name, problem = f"round-{number}", HUNG if lost else None
                found[name, node] = NodeReading(measurement=name, node=node, figures=own, problem=problem)
    present = tuple(range(nodes))
    return Readings([f"n{node}" for node in present], present, found, tuple(read_pairs(found, present)))


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
    assert [round(expected_s(nodes)) for nodes in (8, 64, 256)] == [106, 111, 131]
    assert [round(limit_s(nodes)) for nodes in (8, 64, 256)] == [664, 692, 788]
    ends = [*deadlines(8).values()]
    assert ends == sorted(ends)
    assert [*deadlines(8)] == ["alone", "round-1", "round-2", "round-3", "group"]


@pytest.mark.parametrize("written", [True, False])
def test_what_a_hanging_agent_was_about_to_decide_another_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, written: bool
) -> None:
    files = PairFiles(tmp_path)
    files.path.mkdir()

    def hang(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path if written else PairFiles, "hardlink_to" if written else "write", hang)
        files.write_once(files.present, Members(nodes=(0, 1)))
    assert not files.present.exists()
    for nodes in ((0, 1, 2), (0,)):
        files.write_once(files.present, Members(nodes=nodes))
        assert Members.model_validate_json(files.present.read_text()).nodes == (0, 1, 2)


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


def test_of_eight_nodes_any_two_that_are_slow_are_convicted() -> None:
    draw = random.Random(7)
    for pair in combinations(range(8), 2):
        assert verdict(cluster(8, draw, speed=dict.fromkeys(pair, 0.6))) == ({*pair}, set(), [])


def test_a_node_that_fails_alone_or_falls_silent_is_convicted_by_what_it_said() -> None:
    readings = cluster(8, random.Random(7))
    found = {key: reading for key, reading in readings.found.items() if key not in (("round-2", 3), ("round-3", 3))}
    found[ALONE, 5] = NodeReading(
        measurement=ALONE, node=5, problem="local rank 2: CUDA error: uncorrectable ECC error"
    )
    pairs = tuple(read_pairs(found, readings.present))
    verdicts, _ = decide(Readings([*readings.names, "n8"], readings.present, found, pairs), RULE)
    unfit = {one.node: one.evidence for one in verdicts if one.fit is False}
    assert unfit == {
        "n3": ("it hung: nothing came of it from round 2 on",),
        "n5": ("alone: local rank 2: CUDA error: uncorrectable ECC error",),
        "n8": ("it did not answer when all nodes had to begin",),
    }


@pytest.mark.parametrize("nodes", [4, 8, 16, 33, 64])
def test_half_of_the_cluster_is_not_convicted_but_said(nodes: int) -> None:
    half = range(nodes // 2)
    for bad in (dict.fromkeys(half, 0.6), {2 * node: 0.6 for node in half}):
        unfit, _, notes = verdict(cluster(nodes, random.Random(7), speed=bad))
        assert not unfit
        assert any("rather the network" in note for note in notes)
    unfit, undecided, notes = verdict(cluster(nodes, random.Random(7), hung=range(nodes // 2 + 1)))
    assert not unfit
    assert len(undecided) > nodes // 2
    assert any("rather the software or its settings" in note for note in notes)


@pytest.mark.parametrize("nodes", [8, 16, 33, 64])
def test_a_slow_switch_between_two_halves_is_no_fault_of_nodes(nodes: int) -> None:
    def path(first: int, second: int) -> float:
        return 0.5 if (first < nodes // 2) != (second < nodes // 2) else 1.0

    unfit, undecided, notes = verdict(cluster(nodes, random.Random(7), path=path))
    assert (unfit, undecided) == (set(), set())
    assert any("it may be the path between them" in note for note in notes)


def test_one_slow_path_is_named_as_such() -> None:
    unfit, undecided, notes = verdict(cluster(8, random.Random(7), path=lambda *pair: 0.4 if pair == (2, 3) else 1.0))
    assert (unfit, undecided) == (set(), set())
    assert notes[0].startswith("n2 with n3: ")
    assert notes[0].endswith("both are fine with others, so it may be the path between them")


def test_too_few_are_not_compared() -> None:
    unfit, undecided, _ = verdict(cluster(3, random.Random(7), hung=[2]))
    assert (unfit, undecided) == ({2}, {0, 1})


def test_the_group_is_that_of_the_fit_nodes_and_its_faults_convict_none() -> None:
    readings = cluster(8, random.Random(7), speed={3: 0.5})
    verdicts, _ = decide(readings, RULE)
    group = members(verdicts)
    assert group == (0, 1, 2, 4, 5, 6, 7)

    def notes(first: NodeReading, *, silent: int | None = None) -> list[str]:
        others = {(GROUP, node): NodeReading(measurement=GROUP, node=node) for node in group if node != silent}
        found = {**readings.found, **others, (GROUP, 0): first}
        return [*group_notes(Readings(readings.names, readings.present, found, readings.pairs), group, RULE)]

    fast = NodeReading(measurement=GROUP, node=0, figures=PairFigures(gb_per_s=44))
    assert notes(fast) == []
    assert (
        "is slower than its pairs: 20 GB/s" in notes(fast.model_copy(update={"figures": PairFigures(gb_per_s=20)}))[0]
    )
    assert HUNG in notes(fast.model_copy(update={"problem": HUNG}))[0]
    assert "nothing came of n4" in notes(fast, silent=4)[0]
    assert members([NodeVerdict(node="a", fit=True), NodeVerdict(node="b", fit=None)]) == ()


def test_the_table_has_the_worst_first_and_the_lists_below() -> None:
    readings = cluster(8, random.Random(7), speed={3: 0.5}, hung=[6])
    verdicts, notes = decide(readings, RULE)
    alone = tuple(reading for (name, _), reading in readings.found.items() if name == ALONE)
    times = {"expected_s": expected_s(8), "limit_s": limit_s(8), "took_s": 200.0}
    parts = {"nodes": tuple(verdicts), "notes": tuple(notes), "alone": alone, "pairs": tuple(readings.pairs)}
    result = PairwiseResult(started_at="2026-01-01T00:00:00+00:00", group=PairFigures(gb_per_s=44.0), **times, **parts)
    host_list = find_scheduler("slurm").host_list
    lines = shown_lines(pairs_tables(result, host_list))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert text.index("n3 ") < text.index("n6 ") < text.index("n0 ")
    assert "UNFIT" in text and "with n2: " in text and "All 6 fit nodes at once: 44 GB/s" in text
    assert "llmb submit --exclude unfit, or --exclude n[3,6]" in " ".join(text.split())
    document = pairs_document(result, host_list)
    assert document["unfit_nodes"] == "n[3,6]"
    assert document["nodes"][6] == {"node": "n6", "fit": False, "evidence": ["it hung: nothing came of it alone"]}
    assert {*document["pairs"][0]} == {"nodes", "round", "tflops", "gb_per_s", "latency_s", "problem"}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ((), "--pairwise compares the nodes of a job"),
        (("--nodes", "2"), "--pairwise needs 3 nodes"),
        (("--nodes", "8", "all_reduce", "--max-size", "1GiB"), "does not take COLLECTIVE, --max-size"),
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


def test_the_job_starts_an_agent_per_node_that_no_other_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    (tmp_path / "cluster_config.yaml").write_text("gpu_type: h100\n")
    assert exit_code_of(app, ["bench", "collectives", "--pairwise", "--nodes", "64", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "64 nodes: about 1 min 51 s from the start of the job, at most 11 min 32 s if nodes hang" in err
    assert {"#SBATCH --no-kill", "#SBATCH --time=00:13:00", "#SBATCH --nodes=64"} <= {*out.splitlines()}
    assert "--ntasks=64 --ntasks-per-node=1 --kill-on-bad-exit=1 --no-kill --wait=15" in out
    assert "-m llmb.bench.pair_agent" in out.replace(" \\\n    ", " ")
