# SPDX-License-Identifier: Apache-2.0
"""Jobs that train nothing: what the cluster's settings give them, what their folders hold, and their rows."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmb.base.errors import UsageError
from llmb.base.trust import WORKLOADS
from llmb.catalogue.catalogue import Catalogue, find_fabric
from llmb.jobs.history import open_history
from llmb.jobs.states import read_folder
from llmb.jobs.submit import submit_task
from llmb.jobs.task import BENCHMARKS, CHECKS, PREPARATIONS, TaskKind, TaskOrder, TaskRecord
from llmb.launch.jobspec.job_options import UNBOUND, JobOptions
from llmb.launch.jobspec.spec import JobSpec, Placement
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.site.site import Site
from llmb.runs.folder import RunFolder

SETTINGS = {
    "gpu_type": "h100",
    "environment": {"HERE": "1"},
    "workloads": {"finetune_llama3": {"environment": {"TUNED": "1"}}},
    "modules": ["cuda"],
    "binding": {"cpu": "cores"},
    "vboost": 1,
}
PARENTS: dict[TaskKind, Path] = {
    "preparation": Path(WORKLOADS) / "finetune_llama3" / PREPARATIONS,
    "benchmark": BENCHMARKS,
    "check": CHECKS / "T" / ".jobs",
}


def order_of(kind: TaskKind, install: Path, fabric: str = "infiniband", **values: Any) -> TaskOrder:
    config = cluster_schema().model_validate(SETTINGS)
    workload = "finetune_llama3" if kind == "preparation" else ""
    return TaskOrder(
        task=TaskRecord(kind=kind, subject="it", workload=workload, gpus=True, gpu_type="h100", scale=8),
        name="name",
        parent=install / PARENTS[kind],
        title="title",
        placement=Placement(1, 8, whole_nodes=True),
        time_limit_min=5,
        work=("true",),
        options=JobOptions(variables={"GIVEN": "1"}),
        site=Site(install=install, config=config, fabric=find_fabric(Catalogue(), fabric)),
        **values,
    )


def names_of(spec: JobSpec) -> set[str]:
    return {variable.name for variable in spec.variables}


def test_only_a_measurement_has_what_decides_a_runs_speed(tmp_path: Path) -> None:
    prepared, measured = (
        order_of("preparation", tmp_path).sample(),
        order_of("benchmark", tmp_path, measured=True).sample(),
    )
    own = {"HERE", "GIVEN", "LLMB_INSTALL", "PYTHONUNBUFFERED"}
    assert names_of(prepared) == {*own, "TUNED"}
    assert names_of(measured) > own and not {"TUNED"} & names_of(measured)
    assert (prepared.vboost, prepared.binding) == (None, UNBOUND)
    assert measured.vboost and (measured.vboost.level, measured.binding.cpu) == (1, "cores")
    assert prepared.modules == measured.modules == ("cuda",)
    with pytest.raises(UsageError, match="needs this cluster's values of NCCL_TOPO_FILE"):
        order_of("benchmark", tmp_path, "azure-infiniband", measured=True).sample()


@pytest.fixture
def queued(tmp_path: Path, program: Callable[[str, str], None]) -> Callable[[TaskKind], RunFolder]:
    """Queues a job by a Slurm that accepts everything; its folder."""
    program("sbatch", "date +%N")

    def queue(kind: TaskKind) -> RunFolder:
        with open_history(tmp_path, print) as store:
            return RunFolder(Path(submit_task(store, order_of(kind, tmp_path), os.environ).run_dir))

    return queue


@pytest.mark.parametrize("kind", PARENTS)
def test_a_lost_history_has_jobs_of_every_kind_again(
    kind: TaskKind, queued: Callable[[TaskKind], RunFolder], tmp_path: Path
) -> None:
    folder = queued(kind)

    def rows() -> list[dict[str, Any]]:
        with open_history(tmp_path, lambda _: None) as store:
            return [job.document() for job in store.jobs()]

    (before,) = rows()
    assert (before["kind"], before["subject"], before["scale"], before["gpu_type"]) == (kind, "it", 8, "h100")
    assert (before["run_dir"], before["state"], before["status"]) == (str(folder.path), "PENDING", "queued")
    (tmp_path / ".llmb" / "jobs.sqlite").unlink()
    (after,) = rows()
    assert {name for name in before if before[name] != after[name]} <= {"submitted_s", "reason"}


def mark(folder: RunFolder, code: int, signal: str = "") -> None:
    text = '{"job_id": "7", "restarts": 0, "exit_code": %d, "signal": "%s", "ended_at": "2026-01-01T00:00:00+00:00"}'
    folder.job_end.write_text(text % (code, signal))


def test_a_task_ends_as_its_exit_code_says_with_a_reason_from_its_log(queued: Callable[[TaskKind], RunFolder]) -> None:
    folder = queued("preparation")
    assert read_folder(str(folder.path)).unread == "job_end.json is missing"
    mark(folder, 0)
    assert (read_folder(str(folder.path)).run_status, read_folder(str(folder.path)).complete) == ("success", True)
    folder.log.write_text("reading\nllmb: error: the model is gated\n  do: ask\nsrun: error: Exited with exit code 3\n")
    mark(folder, 3)
    state = read_folder(str(folder.path))
    assert (state.run_status, state.run_reason, state.complete) == ("failed", "the model is gated", False)
    mark(folder, 143, "TERM")
    assert read_folder(str(folder.path)).run_status is None, "Slurm knows who ended it"


def test_a_task_that_slurm_rejects_leaves_nothing(tmp_path: Path, program: Callable[[str, str], None]) -> None:
    program("sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    with open_history(tmp_path, print) as store:
        with pytest.raises(UsageError, match="Slurm rejected the job"):
            submit_task(store, order_of("benchmark", tmp_path), os.environ)
        assert store.jobs() == []
    assert list((tmp_path / BENCHMARKS).iterdir()) == []
