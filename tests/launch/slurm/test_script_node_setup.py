# SPDX-License-Identifier: Apache-2.0
"""The prolog, vboost and the binding of workers, on the nodes of a real Slurm."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import NODES, SlurmCluster

from llmb.launch.jobspec.job_options import Binding, Boost
from llmb.launch.jobspec.spec import JobSpec, Placement
from llmb.launch.slurm.script import batch_script
from llmb.readers.samples.samples import read_samples
from llmb.runs.folder import RunFolder, read_stored
from llmb.runs.record import VboostOutcome

Submit = Callable[..., "subprocess.CompletedProcess[str]"]
FAKE_SMI = """echo "$SLURMD_NODENAME $*" >>"$SMI_CALLS"; [ "$SLURMD_NODENAME" != "$SMI_FAILS" ]"""
TWO_NODES = ("--scale", "4", "--steps", "5")
CORES = len(os.sched_getaffinity(0))


def folder_at(path: Path) -> RunFolder:
    (path / "run_1" / "run").mkdir(parents=True)
    return RunFolder(path / "run_1" / "run")


def spec_of(work: str, **fields: object) -> JobSpec:
    """Two workers on each of two nodes that run shell commands in place of a training."""
    given = {
        "scheduler": "slurm",
        "program": "engine",
        "title": "a test",
        "name": "run",
        "placement": Placement(2, 2, whole_nodes=True),
        "gpus": True,
        "time_limit_min": 5,
        "start": "task-per-gpu",
        "flags": {"nodes": "2", "ntasks-per-node": "2", "cpus-per-task": "1"},
        "python": "python3",
        "work": ("bash", "-c", work),
        "log": "log.out",
    }
    return JobSpec(**{**given, **fields})


@pytest.fixture
def smi(program: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that holds each call of nvidia-smi, with its node."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("SMI_CALLS", str(calls))
    program("sudo", "exit 1")
    program("nvidia-smi", FAKE_SMI)
    return calls


@pytest.fixture
def queue(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Callable[[JobSpec], tuple[str, RunFolder]]]:
    ids = []

    def submit(spec: JobSpec) -> tuple[str, RunFolder]:
        folder = folder_at(tmp_path / "jobs")
        folder.batch_script.write_text(batch_script(spec, folder))
        environ = {**slurm.environ, **{name: os.environ[name] for name in os.environ if name.startswith("SMI_")}}
        environ["PATH"] = os.pathsep.join((str(tmp_path / "bin"), slurm.environ["PATH"]))
        done = subprocess.run(
            ["sbatch", "--parsable", str(folder.batch_script)], env=environ, capture_output=True, text=True, check=True
        )
        ids.append(done.stdout.strip())
        return ids[-1], folder

    yield submit
    for job in ids:
        slurm.run("scancel", job)


def ended(slurm: SlurmCluster, job: str) -> str:
    """How the job ended, and its exit code."""
    form = r"JobState=(\w+) .*?ExitCode=(\d+):"

    def told() -> "re.Match[str]":
        found = re.search(form, slurm.run("scontrol", "-o", "show", "job", job).stdout)
        assert found
        return found

    slurm.wait_for("the job's end", lambda: told()[1] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"))
    return " ".join(told().groups())


@pytest.mark.slurm
def test_vboost_lasts_as_long_as_the_workers(
    smi: Path,
    queue: Callable[[JobSpec], tuple[str, RunFolder]],
    slurm: SlurmCluster,
    tmp_path: Path,
    program: Callable[[str, str], None],
) -> None:
    # Samplers come when the workers hold all cores and all memory of the job.
    program("srun", f'case "$*" in *llmb-sampler*) sleep 2 ;; esac; exec {shutil.which("srun")} "$@"')
    begun = " && ".join(
        f'[ -s "{RunFolder(tmp_path / "jobs" / "run_1" / "run").resources}/{node}.jsonl" ]' for node in NODES
    )
    work = f'cat "$SMI_CALLS" >"$SMI_CALLS.$SLURM_PROCID"; until {begun}; do sleep 0.2; done; exit 0'
    job, folder = queue(spec_of(work, vboost=Boost(level=2), sampled=True, python=sys.executable))
    assert ended(slurm, job) == "COMPLETED 0", (folder.path / "log.out").read_text()
    sampled = read_samples(folder.resources)
    assert [(one.start.node, one.ended) for one in sampled] == [(node, True) for node in NODES]
    during = [smi.with_name(f"calls.{rank}").read_text().splitlines() for rank in range(4)]
    assert all(sorted(lines) == [f"{node} boost-slider --vboost 2" for node in NODES] for lines in during), during
    after = smi.read_text().splitlines()[2:]
    assert sorted(after) == [f"{node} boost-slider --vboost 0" for node in NODES]


@pytest.mark.slurm
def test_vboost_ends_when_the_job_is_cancelled(
    smi: Path, queue: Callable[[JobSpec], tuple[str, RunFolder]], slurm: SlurmCluster
) -> None:
    job, _ = queue(spec_of(f"touch {smi}.$SLURM_PROCID; sleep 300", vboost=Boost(level=1), sampled=True))
    slurm.wait_for("the workers", lambda: all(smi.with_name(f"calls.{rank}").exists() for rank in range(4)))
    slurm.run("scancel", job)
    assert ended(slurm, job).startswith("CANCELLED")
    # A node that is told twice that the workers have ended, by Slurm and by the script, ends the boost twice.
    expected = {f"{node} boost-slider --vboost 0" for node in NODES}
    slurm.wait_for("the end of the boost", lambda: {*smi.read_text().splitlines()[2:]} == expected, within_s=600)


@pytest.mark.slurm
def test_vboost_that_cannot_be_set_fails_the_job(
    smi: Path, queue: Callable[[JobSpec], tuple[str, RunFolder]], slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMI_FAILS", "node2")
    job, folder = queue(spec_of(f"touch {smi}.worked", vboost=Boost(level=1)))
    assert ended(slurm, job) == "FAILED 1"
    assert "llmb: node node2 failed: vboost 1 could not be set" in (folder.path / "log.out").read_text()
    assert not smi.with_name("calls.worked").exists()
    assert "node1 boost-slider --vboost 0" in smi.read_text()


@pytest.mark.slurm
def test_vboost_of_a_recipe_is_told_where_a_node_does_not_allow_it(
    smi: Path, queue: Callable[[JobSpec], tuple[str, RunFolder]], slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMI_FAILS", "node2")
    job, folder = queue(spec_of(f"touch {smi}.worked", vboost=Boost(level=1, required=False)))
    assert ended(slurm, job) == "COMPLETED 0"
    assert "llmb: node node2 trains without vboost 1" in (folder.path / "log.out").read_text()
    assert smi.with_name("calls.worked").exists()
    assert read_stored(folder.vboost, VboostOutcome) == VboostOutcome(level=1, nodes_set=1, nodes=2)
    assert [line for line in smi.read_text().splitlines() if line.endswith(" 0")] == ["node1 boost-slider --vboost 0"]


@pytest.mark.slurm
@pytest.mark.skipif(CORES < 2, reason="two workers need two cores")
def test_a_framework_without_llmb_binds_its_workers_too(
    queue: Callable[[JobSpec], tuple[str, RunFolder]], slurm: SlurmCluster
) -> None:
    spec = spec_of(
        "grep Cpus_allowed_list /proc/self/status",
        binding=Binding(cpu=1, numa="local"),
        control_in_container=False,
        prolog=("true",),
    )
    job, folder = queue(spec)
    assert ended(slurm, job) == "COMPLETED 0", (folder.path / "log.out").read_text()
    log = (folder.path / "log.out").read_text()
    bound = re.findall(r"llmb: local rank (\d) of (node\d): CPUs ([\d,-]+), memory of NUMA node \d+", log)
    assert sorted((node, rank) for rank, node, _ in bound) == [(node, rank) for node in NODES for rank in "01"]
    assert sorted(re.findall(r"Cpus_allowed_list:\s*(\S+)", log)) == sorted(cpus for _, _, cpus in bound)
    for node in NODES:
        assert len({cpus for _, on, cpus in bound if on == node}) == 2


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("start", "forked"), [("task-per-gpu", True), pytest.param("torchrun", False, marks=pytest.mark.measured)]
)
@pytest.mark.slow
def test_the_prolog_runs_on_each_node_and_workers_are_bound(
    submit: Submit, forked_python: str, tmp_path: Path, start: str, forked: bool
) -> None:
    settings = tmp_path / "install" / "cluster_config.yaml"
    seen = tmp_path / "seen"
    prolog = [f"echo first $SLURMD_NODENAME >>'{seen}'", f"echo second $SLURMD_NODENAME >>'{seen}'"]
    text = f"prolog: {json.dumps(prolog)}\nbinding: {{cpu: {'cores' if CORES > 1 else 'none'}, numa: local}}\n"
    settings.write_text(settings.read_text() + text)
    done = submit(*TWO_NODES, "--start", start, "--wait", "--json", python=forked_python if forked else sys.executable)
    assert done.returncode == 0, done.stderr
    lines = seen.read_text().splitlines()
    assert sorted(lines) == [f"{order} {node}" for order in ("first", "second") for node in NODES]
    folder = Path(json.loads(done.stdout)["run_dir"])
    log = (folder / f"log-{folder.name}.out").read_text()
    bound = re.findall(r"llmb: local rank (\d) of (node\d): CPUs ([\d,-]+), memory of NUMA node", log)
    assert sorted((node, rank) for rank, node, _ in bound) == [(node, rank) for node in NODES for rank in "01"]


@pytest.mark.slow
@pytest.mark.slurm
def test_a_prolog_that_fails_on_one_node_fails_the_run_with_its_command(
    submit: Submit, forked_python: str, tmp_path: Path
) -> None:
    settings = tmp_path / "install" / "cluster_config.yaml"
    fails = 'if [ "$SLURMD_NODENAME" = node2 ]; then echo "no /scratch here"; exit 7; fi'
    prolog = ['[ "$SLURMD_NODENAME" = node2 ] || sleep 6', fails]
    settings.write_text(settings.read_text() + f"prolog: {json.dumps(prolog)}\n")
    done = submit(*TWO_NODES, "--wait", "--json", python=forked_python)
    assert done.returncode == 4, done.stderr
    assert "no /scratch here" in done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "failed"
    assert "setup on node2 failed: the prolog ended with exit code 7: if [" in result["reason"]
