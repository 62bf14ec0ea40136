# SPDX-License-Identifier: Apache-2.0
"""Rows by configuration, never by name; what may vary; what differs; which runs are left out; other work per step."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import gpu_record
from timed_runs import noisy_times, write_run

from llmb.base.errors import UsageError
from llmb.jobs.find_runs import find_ended_runs
from llmb.reports.verdict_report import compare_tables
from llmb.runs.plan import Plan
from llmb.verdict.compare_runs import IN_BOTH, Comparison, compare_runs

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> Write:
    """Writes ``runs`` repeats to a folder, of a mean of ``mean_s`` and a CV of 0.5 % in and between runs."""
    count = 0

    def write(folder: str, mean_s: float, *, runs: int = 3, fields: Any = None, **plan: object) -> None:
        nonlocal count
        for _ in range(runs):
            count += 1
            made = tiny_plan(**plan)
            times = noisy_times(mean_s, 0.005, made.steps, seed=count)
            write_run(tmp_path / folder, made, times, number=count, **(fields or {}))

    return write


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., Comparison]:
    def compare(before: str, after: str | None = None, **options: Any) -> Comparison:
        first, second = (
            name and find_ended_runs(str(tmp_path / name), tmp_path, lambda _: None) for name in (before, after)
        )
        return compare_runs(first, second, **options)

    return compare


def test_a_slow_down_of_3_percent_is_found_from_3_repeats(write: Write, compare: Callable[..., Comparison]) -> None:
    write("before", 2.0)
    write("after", 2.06)
    found = compare("before", "after")
    (row,) = found.rows
    assert row.recipe == "pretrain_llama3.1 tiny fp32 on 2 x cpu"
    assert (row.n_before, row.n_after, row.verdict, found.verdict) == (3, 3, "regressed", "regressed")
    assert row.before_s == pytest.approx(2.0, rel=0.01) and row.after_s == pytest.approx(2.06, rel=0.01)
    assert row.delta_pct and row.ci95_pct and row.ci95_pct[0] < row.delta_pct < row.ci95_pct[1]
    assert row.noise_pct and 0 < row.noise_pct < 2
    assert row.tolerance_pct == 1  # on the same node
    assert compare("before", "after", tolerance_pct=8).verdict == "pass"
    assert compare("after", "before").verdict == "improved"


def test_runs_are_grouped_by_their_configuration_whatever_their_folders_are_called(
    write: Write, compare: Callable[..., Comparison], tmp_path: Path
) -> None:
    write("before", 2.0, overrides={"seq_len": 64})
    write("before", 3.0)
    write("after", 3.0)
    for run in (tmp_path / "before").glob("workloads/*/experiments/*_seq64/*/*"):
        run.rename(run.with_name(run.name.removesuffix("_seq64")))
    for folder in (tmp_path / "before").glob("workloads/*/experiments/*_seq64"):
        folder.rename(folder.with_name(folder.name.removesuffix("_seq64") + "_again"))
    assert len({path.name for path in tmp_path.glob("before/workloads/*/experiments/*/*/*")}) == 1
    (row,) = compare("before", "after").rows
    assert (row.n_before, row.n_after) == (3, 3)
    assert row.before_s == pytest.approx(3.0, rel=0.01)


def test_recipes_of_one_side_are_listed_with_what_they_differ_in(
    write: Write, compare: Callable[..., Comparison]
) -> None:
    write("before", 2.0, dtype="fp32")
    write("after", 1.5, dtype="bf16")
    found = compare("before", "after")
    assert (found.rows, found.verdict) == ((), "not comparable")
    before, after = found.unmatched
    assert (before.side, before.recipe, len(before.runs)) == ("before", "pretrain_llama3.1 tiny fp32 on 2 x cpu", 3)
    assert [(one.key, one.before, one.after) for one in before.differs] == [("dtype", "fp32", "bf16")]
    assert before.differs == after.differs
    (row,) = compare("before", "after", vary=["dtype"]).rows
    assert row.recipe == "pretrain_llama3.1 tiny fp32 -> bf16 on 2 x cpu"
    assert (row.verdict, row.measure) == ("improved", "step_time")
    assert row.speed_up == pytest.approx(2 / 1.5, rel=0.02)


def test_groups_of_one_selection_are_compared_with_the_first(write: Write, compare: Callable[..., Comparison]) -> None:
    write("both", 1.5, dtype="bf16")
    write("both", 2.0, dtype="fp32")
    with pytest.raises(UsageError, match="both sides have the same runs"):
        compare("both", "both")
    for found in (compare("both", vary=["dtype"]), compare("both", "both", vary=["dtype"])):
        (row,) = found.rows
        assert row.before_s > row.after_s
        assert [(one.key, one.before, one.after) for one in found.differences] == [("dtype", "fp32", "bf16")]


@pytest.mark.parametrize(
    ("gbs", "mean_s", "scaling", "speed_up"),
    [(8, 1.1, "strong", 0.91), (16, 2.2, "weak", 0.91), (12, 1.65, "mixed", 0.91)],
)
def test_scaling_compares_throughput_per_gpu(
    write: Write, compare: Callable[..., Comparison], gbs: int, mean_s: float, scaling: str, speed_up: float
) -> None:
    write("runs", 2.0, scale=2, overrides={"gbs": 8})
    write("runs", mean_s, scale=4, overrides={"gbs": gbs})
    (row,) = compare("runs", vary=["scale"], tolerance_pct=15).rows
    assert (row.recipe, row.scaling) == ("pretrain_llama3.1 tiny fp32 on 2 -> 4 x cpu", scaling)
    assert row.measure == ("step_time" if scaling == "weak" else "gpu_time_per_token")
    assert row.speed_up == pytest.approx(speed_up, rel=0.02)
    assert row.after_s == pytest.approx(mean_s, rel=0.02)
    assert row.verdict == "pass"


def test_rows_that_would_have_the_same_title_say_what_they_differ_in(
    write: Write, compare: Callable[..., Comparison]
) -> None:
    for side in ("before", "after"):
        for mbs in (1, 2):
            write(side, 2.0, overrides={"mbs": mbs})
    assert [row.recipe.rpartition(", ")[2] for row in compare("before", "after").rows] == ["mbs 1", "mbs 2"]


def test_other_work_per_token_is_not_compared(write: Write, compare: Callable[..., Comparison]) -> None:
    write("before", 2.0)
    write("after", 1.0, overrides={"seq_len": 64})
    found = compare("before", "after", vary=["layout.seq_len"])
    (row,) = found.rows
    assert (row.verdict, row.delta_pct, row.ci95_pct, row.speed_up) == ("not comparable", None, None, None)
    assert row.reason == "a token is not the same work on both sides; these settings differ: layout.seq_len"


def test_other_work_on_the_machine_is_named(write: Write, tmp_path: Path) -> None:
    write("before", 2.0)
    write("after", 2.06)
    before, after = (find_ended_runs(str(tmp_path / name), tmp_path, lambda _: None) for name in ("before", "after"))
    busy = replace(after.runs[0], faults={"other_work": ("another run", "other processes used 2.0 of 4 cores")})
    (row,) = compare_runs(before, replace(after, runs=(busy, *after.runs[1:]))).rows
    count = len(after.runs)
    named = "other work on the machine after: another run during 1 of {0} runs; other processes used 2.0 of 4 cores"
    named = f"{named} during 1 of {{0}} runs".format(count)
    assert row.reason and row.reason.endswith(named)
    assert row.soft and not compare_runs(before, after).rows[0].soft


def test_a_comparison_of_other_windows_is_soft(write: Write, compare: Callable[..., Comparison]) -> None:
    write("before", 2.0, steps=50, window="35-44")
    write("after", 2.0, steps=50, window="10-19")
    (row,) = compare("before", "after").rows
    assert row.soft and row.reason and row.reason.endswith("window: 35-44 before, 10-19 after")


def test_what_differs_in_the_records_is_listed(write: Write, compare: Callable[..., Comparison]) -> None:
    write("before", 2.0, fields={"environment": {"torch": "2.12.0", "nodes": ["node1"]}}, seed=1)
    write("after", 2.0, fields={"environment": {"nodes": ["node1"]}}, runs=2, seed=2)
    write("after", 2.0, fields={"environment": {"nodes": ["node2"]}}, runs=1, seed=2)
    found = compare("before", "after")
    assert {one.key: (one.before, one.after) for one in found.differences} == {
        "software.torch": ("2.12.0", "2.13.0"),
        "nodes": ("node1", "node1, node2"),
    }
    (row,) = found.rows
    assert row.tolerance_pct == 3, "nodes differ"


def test_runs_that_measure_nothing_are_left_out_with_the_reason(
    write: Write, compare: Callable[..., Comparison]
) -> None:
    write("before", 2.0)
    write("before", 9.0, runs=1, fields={"failed": "out of memory"})
    write("after", 2.0)
    write("after", 9.0, runs=1, steps=1)
    found = compare("before", "after")
    assert [(one.side, one.reason) for one in found.left_out] == [
        ("before", "failed: out of memory"),
        ("after", "the only step is the first one, which includes warm-up"),
    ]
    assert found.rows[0].n_before == found.rows[0].n_after == 3


def test_a_recipe_that_only_fails_after_a_change_is_not_passed_over(
    write: Write, compare: Callable[..., Comparison]
) -> None:
    write("before", 2.0)
    write("before", 1.5, dtype="bf16")
    write("after", 2.0)
    assert compare("before", "after", tolerance_pct=3).verdict == "pass"
    write("after", 1.5, dtype="bf16", runs=1, fields={"failed": "NCCL error"})
    found = compare("before", "after", tolerance_pct=3)
    assert found.verdict == "not comparable"
    assert [(one.recipe, one.reason) for one in found.unmatched] == [
        ("pretrain_llama3.1 tiny bf16 on 2 x cpu", "failed: NCCL error")
    ]


def test_a_run_of_both_selections_counts_as_after(write: Write, compare: Callable[..., Comparison]) -> None:
    write("all", 2.0)
    write("all/new", 2.0)
    found = compare("all", "all/new")
    assert (found.rows[0].n_before, found.rows[0].n_after) == (3, 3)
    assert [one.reason for one in found.left_out] == 3 * [IN_BOTH]


def test_two_groups_of_one_run_are_compared_by_their_steps(write: Write, compare: Callable[..., Comparison]) -> None:
    write("before", 2.0, runs=1)
    write("after", 2.5, runs=1)
    (row,) = compare("before", "after").rows
    assert row.noise_pct is None and row.ci95_pct and row.verdict == "regressed"
    assert row.reason and "one run on each side" in row.reason


def test_names_that_cannot_vary_are_refused(write: Write, compare: Callable[..., Comparison]) -> None:
    write("before", 2.0)
    with pytest.raises(UsageError, match="unknown --vary 'dtypes'; did you mean 'dtype'"):
        compare("before", vary=["dtypes"])
    with pytest.raises(UsageError) as caught:
        compare("before", vary=["foo"])
    names = [choice.replace("_", "-") for choice in caught.value.choices]
    assert "dtype" in names and "gpu-type" in names and len(set(names)) == len(names)


def test_engines_are_compared_by_their_document(compare: Callable[..., Comparison], tmp_path: Path) -> None:
    for name, seconds in (("old", 1.0), ("new", 1.1)):
        document = engine_document({"llmb": seconds, "megatron": 1.2})
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    (row,) = compare("old.json", vary=["program"]).rows
    assert row.recipe == "pretrain_llama3.1 tiny bf16 on 1 x h200, llmb -> megatron"
    assert row.delta_pct == pytest.approx(20, abs=1) and row.verdict == "regressed"
    found = compare("old.json", "new.json")
    assert [(row.recipe.rpartition(", ")[2], row.verdict) for row in found.rows] == [
        ("program llmb", "regressed"),
        ("program megatron", "pass"),
    ]
    assert [one.reason for one in found.left_out] == 2 * ["failed: out of memory"]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="not a comparison of engines"):
        compare("other.json", "new.json")


def test_variants_of_an_engine_and_results_of_other_code_are_not_mixed_with_it(
    compare: Callable[..., Comparison], tmp_path: Path
) -> None:
    document = engine_document({"llmb": 1.0})
    variants = [{**case, "variant": "current-scaling"} for case in document["cases"][:3]]
    old = [{**case, "outdated": "of other code", "engine": "old"} for case in document["cases"][:3]]
    (tmp_path / "new.json").write_text(json.dumps({**document, "cases": [*document["cases"], *variants, *old]}))
    (tmp_path / "first.json").write_text(json.dumps({**document, "schema_version": 1}))
    found = compare("first.json", "new.json")
    (row,) = found.rows
    assert (row.n_before, row.n_after, row.verdict) == (3, 3, "pass")
    assert [one.reason for one in found.left_out].count("outdated: of other code") == 3


def engine_document(seconds: dict[str, float]) -> dict[str, Any]:
    """As ``benchmarks.engine`` writes it."""
    from benchmarks.engine.records import CaseResult, Document, Settings

    same: dict[str, Any] = {
        "model": "tiny",
        "workload": "pretrain_llama3.1",
        "size": "tiny",
        "dtype": "bf16",
        "gpu_type": "h200",
        "proxy": False,
        "layers": 2,
        "vocab_size": 512,
        "experts": None,
        "parameters": 1000,
        "code": "0",
        "mbs": 1,
        "ga": 8,
        "gbs": 8,
        "seq_len": 128,
    }
    cases = [
        CaseResult(
            **same, engine=engine, engine_version="1", round=number, status="done",
            step_times_s=tuple(noisy_times(mean, 0.002, 10, number)),
        )
        for engine, mean in seconds.items()
        for number in range(3)
    ]  # fmt: skip
    failed = CaseResult(
        **same, engine="torchtitan", engine_version="1", round=0, status="failed", reason="out of memory"
    )
    settings = Settings(
        gpu_type="h200", device="NVIDIA H200", tiny=True, warmup_steps=1, steps=10, seed=1,
        compiled=True, llmb_options="", expandable_segments=False, torch="2.11.0",
    )  # fmt: skip
    return Document(settings=settings, environment={}, cases=(*cases, failed)).model_dump(mode="json")


def write_log(folder: Path, name: str, mean_s: float, seed: int) -> None:
    """As NeMo 2 writes it."""
    times = enumerate(noisy_times(mean_s, 0.003, 50, seed))
    lines = [
        f"Training epoch 0, iteration {step}/49 | lr: 4.491e-06 | global_batch_size: 128 | global_step: {step} |"
        f" reduced_train_loss: 12.81 | train_step_timing in s: {seconds:.4g}\n"
        for step, seconds in times
    ]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(lines))


NEMO_LOG = "log-account.pretrain_llama3.1_8b_{dtype}_gpus{gpus}_tp1_pp1_cp2_vp1_ep1_mbs1_gbs{gbs}_{job}_0.out"


def test_logs_without_a_record_are_compared_by_what_they_tell(
    compare: Callable[..., Comparison], tmp_path: Path
) -> None:
    for number in range(3):
        same = {"dtype": "bf16", "gpus": 8, "gbs": 128}
        write_log(tmp_path / "before", NEMO_LOG.format(**same, job=number), 12.0, number)
        write_log(tmp_path / "after", NEMO_LOG.format(**same, job=10 + number), 12.6, 10 + number)
        scaled = NEMO_LOG.format(dtype="bf16", gpus=16, gbs=128, job=20 + number)
        write_log(tmp_path / "after", scaled, 6.6, 20 + number)
    found = compare("before", "after")
    (row,) = found.rows
    assert (row.recipe.partition(" on ")[0], row.n_before, row.n_after) == ("pretrain_llama3.1 8b bf16", 3, 3)
    assert row.verdict == "regressed" and row.delta_pct == pytest.approx(5, abs=1)
    (scaling,) = compare("after", vary=["scale"]).rows
    assert (scaling.scaling, scaling.measure) == ("strong", "gpu_time_per_token")
    assert scaling.speed_up == pytest.approx(12.6 / (2 * 6.6), rel=0.02)


def test_a_log_is_compared_with_the_run_that_it_agrees_with(compare: Callable[..., Comparison], tmp_path: Path) -> None:
    for number in range(3):
        name = NEMO_LOG.format(dtype="bf16", gpus=8, gbs=128, job=number)
        write_log(tmp_path / "before", name, 12.0, number)
        write_run(
            tmp_path / "after", gpu_record(steps=50).plan, noisy_times(12.0, 0.003, 50, 50 + number), number=number
        )
    (row,) = compare("before", "after", vary=["program"]).rows
    assert (row.n_before, row.n_after) == (3, 3)
    assert "nemo" in row.recipe


def test_the_change_is_rounded_so_that_it_is_on_its_side_of_the_tolerance(
    write: Write, compare: Callable[..., Comparison]
) -> None:
    write("before", 0.1)
    write("after", 0.103)
    comparison = compare("before", "after", tolerance_pct=3)
    texts = {3.04: "+3.04", -3.04: "-3.04", 2.96: "+3.0", 3.0: "+3.0", 2.9: "+2.9"}
    rows = tuple(comparison.rows[0].model_copy(update={"delta_pct": delta_pct}) for delta_pct in texts)
    (table, *_) = compare_tables(comparison.model_copy(update={"rows": rows}))
    assert [cells[4] for cells in table.rows] == list(texts.values())
