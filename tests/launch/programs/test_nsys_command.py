# SPDX-License-Identifier: Apache-2.0
"""Nsight Systems cannot be had here; a program of its name answers for it. What it is asked for is checked."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from quick_order import spec_of

from llmb.base.errors import EnvironmentProblem
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.jobs.begin import begin
from llmb.launch.jobspec.spec import write_spec
from llmb.launch.local import local_command
from llmb.launch.local_spec import local_spec
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.engine.nsys_command import become_worker, check_here, nsys_command, with_profiler
from llmb.launch.programs.port import End
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan, make_plan
from llmb.runs.profiling import Profiling
from llmb.runs.record import new_record, queued_record, read_record, write_record
from llmb.runs.trace_reports import profile_file, report_profile

MAVERICK = "finetune_llama4-maverick"
CHOICES = Choices(profiling=Profiling(profile=True, profile_ranks="2-3"))


def gpu_plan(choices: Choices) -> Plan:
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=8)
    return make_plan(resolve(Catalogue(), request), choices, device="cuda")


@pytest.fixture
def nsys(program: Callable[[str, str], None]) -> Callable[[str], None]:
    """Puts a program ``nsys`` on the PATH that runs the given shell text; $@ are its arguments."""
    return partial(program, "nsys")


def test_nsys_is_taken_where_it_is_and_gpus_are(nsys: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    nsys("exit 0")
    left_open = gpu_plan(CHOICES)
    found = with_profiler(left_open).profile
    assert found
    assert (found.profiler, found.or_torch, found.reason) == ("nsys", False, None)
    assert with_profiler(gpu_plan(Choices())) == gpu_plan(Choices())
    monkeypatch.setenv("PATH", "/nowhere")
    replaced = with_profiler(left_open).profile
    assert replaced
    assert (replaced.profiler, replaced.or_torch) == ("torch", False)
    assert "'nsys' is not on the PATH" in str(replaced.reason)
    check_here(left_open)
    with pytest.raises(EnvironmentProblem, match="'nsys' is not on the PATH"):
        check_here(gpu_plan(with_nsys(CHOICES)))
    with pytest.raises(EnvironmentProblem, match="'nsys' is not on the PATH"):
        check_here(gpu_plan(Choices(profiling=CHOICES.profiling.model_copy(update={"profile_gpu_metrics": True}))))


@pytest.mark.parametrize(("path", "profiler"), [("/nowhere", "torch"), (None, "nsys")])
def test_a_job_takes_the_profiler_of_its_node(
    tmp_path: Path,
    nsys: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    path: str | None,
    profiler: str,
) -> None:
    """Whoever submits does not know what the node has; its log and its result report the replacement."""
    nsys("exit 0")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    write_record(folder, queued_record(gpu_plan(CHOICES), ("sbatch",)))
    write_spec(folder, spec_of(gpu_plan(CHOICES), tmp_path))
    if path:
        monkeypatch.setenv("PATH", path)
    begin(folder, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"})
    plan = read_record(folder).plan
    assert plan.profile
    assert plan.profile.profiler == profiler
    started: list[str] = []
    monkeypatch.setattr("os.execvp", lambda _file, command: started.extend(command))
    monkeypatch.setattr(sys, "argv", ["nsys", str(folder.path)])
    monkeypatch.setenv("RANK", "0")
    become_worker()
    assert "llmb.engine.worker" in started
    replaced = "PyTorch's profiler replaces Nsight Systems"
    assert (replaced in capfd.readouterr().out) == (profiler == "torch")
    report = report_profile(folder, plan)
    assert report
    assert (replaced in " ".join(report.warnings)) == (profiler == "torch")


@pytest.mark.parametrize(
    ("workload", "size", "environ", "name"),
    [
        (MAVERICK, "400b", {"SLURM_JOB_ID": "933609", "SLURM_NODEID": "1"}, "profile_933609_node1_rank2.nsys-rep"),
        (MAVERICK, "400b", {}, "profile_2.nsys-rep"),
        ("pretrain_llama3.1", "8b", {"SLURM_JOB_ID": "933609", "SLURM_NODEID": "1"}, "profile_2.nsys-rep"),
    ],
)
def test_reports_have_the_documents_names(
    tmp_path: Path, workload: str, size: str, environ: dict[str, str], name: str
) -> None:
    recipe = resolve(Catalogue(), Request(workload=workload, size=size, gpu_type="h100"))
    plan, folder = make_plan(recipe, with_nsys(CHOICES), device="cuda"), RunFolder(tmp_path / "run")
    (output,) = (word for word in nsys_command(plan, folder, 2, environ) if word.startswith("--output="))
    report = Path(output.removeprefix("--output=") + ".nsys-rep")
    assert report == folder.nsys_profile / name
    assert profile_file(folder, plan, 2) == folder.nsys_profile / "profile_2.nsys-rep", "nothing is written yet"
    folder.nsys_profile.mkdir(parents=True)
    report.write_bytes(b"report")
    (folder.nsys_profile / report.name.replace("rank2", "rank12")).write_bytes(b"of another rank")
    assert profile_file(folder, plan, 2) == report


def with_nsys(choices: Choices, **more: object) -> Choices:
    return choices.model_copy(update={"profiling": choices.profiling.model_copy(update={"profiler": "nsys", **more})})


def test_only_profiled_ranks_run_under_nsys(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "with space" / "run")
    plan = gpu_plan(with_nsys(CHOICES, profile_gpu_metrics=True))
    assert "llmb.launch.programs.engine.nsys_command" in local_command(local_spec(plan, tmp_path, {}, folder), folder)
    assert "llmb.engine.worker" in local_command(local_spec(gpu_plan(Choices()), tmp_path, {}, folder), folder)
    assert nsys_command(plan, folder, 0, {}) == ()
    first, second = nsys_command(plan, folder, 2, {}), nsys_command(plan, folder, 3, {})
    assert first[:2] == ("nsys", "profile")
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--trace=nvtx,cuda"} < set(first)
    assert f"--output={folder.path}/nsys_profile/profile_2" in first
    assert set(first) - set(second) == {
        f"--output={folder.path}/nsys_profile/profile_2",
        "--gpu-metrics-devices=cuda-visible",
    }


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.measured)])
def test_a_rank_becomes_its_worker(tmp_path: Path, nsys: Callable[[str], None], rank: int) -> None:
    """The worker then fails for want of its ranks' store; what matters is who was started, and how."""
    nsys('printf "%s\\n" "$@" > "$(dirname "$0")/asked"; while [ "$1" != "$WORKER" ]; do shift; done; exec "$@"')
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    plan = gpu_plan(with_nsys(CHOICES))
    write_record(folder, new_record(plan, local_command(local_spec(plan, tmp_path, {}, folder), folder)))
    environ = {**os.environ, "RANK": str(rank), "WORKER": sys.executable}
    command = [sys.executable, "-m", "llmb.launch.programs.engine.nsys_command", str(folder.path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "llmb/engine/worker.py" in done.stderr
    asked, worker = tmp_path / "bin" / "asked", ["-m", "llmb.engine.worker", str(folder.path)]
    assert asked.exists() == (rank == 2)
    if rank == 2:
        assert asked.read_text().splitlines()[-5:] == [sys.executable, "-P", *worker]


def test_a_report_that_cannot_be_exported_is_a_warning(tmp_path: Path, nsys: Callable[[str], None]) -> None:
    nsys('echo "the report is from a newer version" >&2; exit 3')
    folder = RunFolder(tmp_path / "run")
    folder.nsys_profile.mkdir(parents=True)
    plan = gpu_plan(with_nsys(CHOICES))
    (folder.nsys_profile / "profile_2.nsys-rep").write_bytes(b"report")
    record = new_record(plan, local_command(local_spec(plan, tmp_path, {}, folder), folder))
    result = finish_run(folder, record, End(1))
    assert result.profile
    assert result.profile.files == ("nsys_profile/profile_2.nsys-rep",)
    assert result.profile.warnings == (
        "profiles were not written: profile_3.nsys-rep; the run's log may show why",
        "no breakdown of a step: profile_2.nsys-rep could not be exported: nsys: the report is from a newer version",
    )
    assert json.loads(folder.record.read_text())["result"]["profile"]["profiler"] == "nsys"
