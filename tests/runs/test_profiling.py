# SPDX-License-Identifier: Apache-2.0
"""What is profiled of a run, what is refused, and what its statistics are then taken over."""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from fake_steps import step_of

from llmb.base.errors import UsageError
from llmb.base.missing import Missing
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.readers.logs.log_files import find_logs
from llmb.runs.choices import Choices
from llmb.runs.conclusion import RunEvidence, conclude
from llmb.runs.experiment import experiment_name
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan, make_plan
from llmb.runs.profiling import Profile, Profiling, listed
from llmb.runs.steps import Step
from llmb.runs.trace_reports import report_profile, write_breakdown


def gpu_plan(profiling: Profiling, steps: int | None = None) -> Plan:
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=16)
    return make_plan(resolve(Catalogue(), request), Choices(steps=steps, profiling=profiling), device="cuda")


def steps_of(plan: Plan) -> list[Step]:
    """A step takes 1 s, one that is slowed down 100 s."""
    return [
        step_of(number, 100.0 if plan.slows_down(number) else 1.0, profiled=plan.slows_down(number))
        for number in range(plan.steps)
    ]


@pytest.mark.parametrize(
    ("profiling", "steps", "expected"),
    [
        (Profiling(), 50, None),
        (Profiling(profile=True), None, (25, 20, 25)),  # as its document, of 25.04
        (Profiling(profile=True), 50, (50, 20, 25)),
        (Profiling(profile=True, profile_stop_step=50, profile_start_step=45), None, (50, 45, 50)),
        (Profiling(profile=True, profile_stop_step=25), None, (25, 20, 25)),
        (Profiling(profile=True, profile_stop_step=15), None, (15, 13, 15)),
        (Profiling(profile=True, profile_start_step=22), None, (25, 22, 25)),
        (Profiling(profile=True, profile_start_step=30), None, (50, 30, 50)),
        (Profiling(profile=True), 10, (10, 9, 10)),
        (Profiling(profile=True), 1, (1, 0, 1)),
        (Profiling(profile=True, profile_stop_step=3), 50, (50, 2, 3)),
        (Profiling(profile=True, profile_start_step=7), 20, (20, 7, 20)),
    ],
)
def test_steps_that_are_profiled(
    profiling: Profiling, steps: int | None, expected: tuple[int, int, int] | None
) -> None:
    plan = gpu_plan(profiling, steps)
    found = plan.profile and (plan.steps, plan.profile.first_step, plan.profile.stop_step)
    assert found == expected


def test_ranks_and_profiler(tiny_plan: Callable[..., Plan]) -> None:
    assert gpu_plan(Profiling(profile=True)).profile == Profile(
        profiler="nsys", or_torch=True, first_step=20, stop_step=25, ranks=tuple(range(8))
    )
    torch = gpu_plan(Profiling(profile=True, profiler="torch")).profile
    assert torch
    assert (torch.profiler, torch.or_torch) == ("torch", False)
    nsys = gpu_plan(Profiling(profile=True, profiler="nsys", profile_ranks="0,8-10", profile_gpu_metrics=True)).profile
    assert nsys
    assert (nsys.profiler, nsys.ranks, nsys.gpu_metrics) == ("nsys", (0, 8, 9, 10), True)
    own = tiny_plan(profiling=Profiling(profile=True)).profile
    assert own
    assert (own.profiler, own.ranks) == ("torch", (0, 1))
    assert listed("3,1-2,2") == (1, 2, 3)


@pytest.mark.parametrize(
    ("profiling", "says"),
    [
        (Profiling(profile=True, nccl_trace=True), "mutually exclusive"),
        (Profiling(profile=True, profile_start_step=30, profile_stop_step=20), "do not fit"),
        (Profiling(profile=True, profile_stop_step=51), "numbered 0-49"),
        (Profiling(profile=True, profile_start_step=50), "do not fit"),
        (Profiling(profile=True, profile_ranks="0-16"), "rank 16, but the run's last rank is 15"),
        (Profiling(profile=True, profile_ranks="first"), "specify ranks such as 0,4-7"),
        (Profiling(profile=True, profile_ranks="7-4"), "specify ranks such as 0,4-7"),
        (Profiling(profile=True, profiler="torch", profile_gpu_metrics=True), "needs Nsight Systems"),
        (Profiling(profile_start_step=3), "--profile-start-step needs --profile"),
        (Profiling(profile_ranks="0"), "--profile-ranks needs --profile"),
        (Profiling(profile_gpu_metrics=True), "--profile-gpu-metrics needs --profile"),
    ],
)
def test_what_cannot_be_is_refused(profiling: Profiling, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        gpu_plan(profiling, 50)


@pytest.mark.parametrize(
    ("profiling", "says"),
    [
        (Profiling(nccl_trace=True), "gloo, which writes no such log"),
        (Profiling(profile=True, profiler="nsys"), "--profiler nsys needs GPUs"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(tiny_plan: Callable[..., Plan], profiling: Profiling, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tiny_plan(profiling=profiling)


def test_an_nccl_trace_takes_five_steps() -> None:
    assert gpu_plan(Profiling(nccl_trace=True)).steps == 5
    assert gpu_plan(Profiling(nccl_trace=True), 7).steps == 7


def test_the_name_of_a_run_says_what_slowed_it_down(tmp_path: Path) -> None:
    plain = experiment_name(gpu_plan(Profiling()))
    names = [
        experiment_name(gpu_plan(profiling))
        for profiling in (
            Profiling(profile=True, profiler="torch"),
            Profiling(profile=True, profiler="nsys"),
            Profiling(nccl_trace=True),
        )
    ]
    assert names == [f"{plain}_torchprofile", f"{plain}_nsys", f"{plain}_nccltrace"]
    for name in names:
        (tmp_path / f"log-{name}.out").write_text("")
    found = find_logs(tmp_path)
    assert not found.logs
    statuses = {file.path.stem.rpartition("_")[2]: file.outcome.status for file in found.refused}
    assert statuses == {"torchprofile": "profiled", "nsys": "profiled", "nccltrace": "traced"}


@pytest.mark.parametrize(
    ("start", "stop", "count"), [(45, 50, 10), (40, 50, 5), (44, 46, 9), (39, 50, None), (0, 50, None)]
)
def test_profiled_steps_never_enter_statistics(
    tiny_plan: Callable[..., Plan], start: int, stop: int, count: int | None
) -> None:
    """The window is 35-44; where more than half of it is profiled, the rest stands for nothing."""
    plan = tiny_plan(profiling=Profiling(profile=True, profile_start_step=start, profile_stop_step=stop))
    result = conclude(RunEvidence(plan, steps_of(plan)))
    assert result.status == "success"
    if count is None:
        assert isinstance(result.step_time_s, Missing) and result.tokens_per_s is None
        assert "steps of the window were profiled" in result.step_time_s.reason
    else:
        assert result.step_time_s
        assert (result.step_time_s.count, result.step_time_s.mean) == (count, 1.0)


def test_a_traced_run_has_no_step_time() -> None:
    plan = gpu_plan(Profiling(nccl_trace=True))
    result = conclude(RunEvidence(plan, steps_of(plan)))
    assert result.step_time_s == Missing("1 of the 1 steps of the window were traced, which slows them down")


def write_trace(path: Path, durations: Iterable[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    at, events = 0.0, []
    for number, duration in enumerate(durations):
        common = {"ph": "X", "pid": 1, "tid": 1, "ts": at}
        events.append({**common, "cat": "user_annotation", "name": f"ProfilerStep#{45 + number}", "dur": duration})
        events.append({**common, "cat": "cpu_op", "name": "aten::mm", "dur": duration / 4})
        at += duration
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def test_the_breakdown_is_of_the_typical_step(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    plan, folder = tiny_plan(profiling=Profiling(profile=True)), RunFolder(tmp_path)
    write_trace(folder.torch_profile / "rank-0.json.gz", [90, 40, 50, 60, 10])
    write_trace(folder.torch_profile / "rank-1.json.gz", [1])
    report = report_profile(folder, plan)
    assert report
    assert (report.files, report.warnings) == (("torch_profile/rank-0.json.gz", "torch_profile/rank-1.json.gz"), ())
    assert report.breakdown
    assert (report.breakdown.step, report.breakdown.rank) == (47, 0)
    assert report.breakdown.matrix_product_s == pytest.approx(12.5e-6)
    write_breakdown(folder, report)
    assert json.loads(folder.breakdown.read_text())["step"] == 47
    write_trace(folder.torch_profile / "rank-0.json.gz", [1])
    assert report_profile(folder, plan) == report, "a breakdown that is kept is not made anew"


def test_a_missing_profile_is_a_warning(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    plan, folder = tiny_plan(profiling=Profiling(profile=True)), RunFolder(tmp_path)
    write_trace(folder.torch_profile / "rank-1.json.gz", [10])
    report = report_profile(folder, plan)
    assert report
    assert report.warnings == ("profiles were not written: rank-0.json.gz; the run's log may show why",)
    assert report.breakdown
    (folder.torch_profile / "rank-1.json.gz").write_bytes(b"cut off")
    report = report_profile(folder, plan)
    assert report
    assert report.breakdown is None
    assert "no breakdown of a step: not a trace: the file is not JSON (rank-1.json.gz)" in report.warnings
    assert report_profile(folder, tiny_plan()) is None
