# SPDX-License-Identifier: Apache-2.0
"""A sample of each JSON document, made by the code that makes the real one."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bench_samples import sample_gpus, sample_history, sample_measurements, sample_pairs
from comparison_samples import sample_comparison
from verdict_samples import run_with_times, sample_judgement

from llmb.base.statistics import describe, describe_means
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import Request, resolve
from llmb.catalogue.user_files import UserFile
from llmb.jobs.job import Job, row_of_record
from llmb.jobs.order import Prepared, make_order
from llmb.jobs.pace import Expected, RunView, compare_with, find_pace
from llmb.jobs.settings_in_effect import Setting, SettingsInEffect
from llmb.jobs.submit import new_job
from llmb.launch.documents.launch_scripts import CheckedFile, launch_scripts
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.programs.conclude import EndedRun
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.launch.site.cluster_config import SettingsFile
from llmb.launch.site.site import Site
from llmb.nodes.doctor.check_records import Check, NodeReport, NotChecked
from llmb.nodes.doctor.checked_nodes import NodesResult
from llmb.prediction.memory import estimate
from llmb.prediction.prediction import default_calibration, predict
from llmb.prediction.search import Candidate, Remedy
from llmb.readers.logs.log_files import ParsedFile
from llmb.readers.logs.outcome import LogOutcome
from llmb.reports.doctor_report import DriftReport
from llmb.reports.doctor_report import nodes_document as checked_nodes_document
from llmb.reports.install_report import (
    access_document,
    checked_document,
    image_document,
    install_document,
    settings_document,
)
from llmb.reports.jobs_report import jobs_document, watch_document
from llmb.reports.parse_report import parse_document, parse_report
from llmb.reports.predict_report import LayoutPlan, RunMemory, RunPrediction
from llmb.reports.run_report import run_document
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.choices import Choices
from llmb.runs.conclusion import RunEvidence, conclude
from llmb.runs.conditions import Drift
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan, Plan, make_plan
from llmb.runs.rank_account import OWNERS, CollectiveCount, MemoryUse, RankAccount
from llmb.runs.record import new_record, queued_record
from llmb.runs.steps import ExpertLoad, Step, StepNews
from llmb.setup.install.answers import Answers
from llmb.setup.install.images import ImportedImage
from llmb.setup.install.installing import StepResult
from llmb.setup.prepare.hub import NeededRepository, RepositoryAccess


def sample_documents(catalogue: Catalogue) -> dict[str, Mapping[str, Any]]:
    """A sample of each frozen document, of a recipe that is trained or of one with published figures."""
    plan, recipe = sample_plan(catalogue), sample_recipe(catalogue)
    values: dict[str, Any] = {item.name: 1 for item in fields(Step)}
    load = ExpertLoad(max_over_mean=1.0, idle_experts=0)
    values |= {"expert_load": load, "profiled": False}
    steps = [Step(**{**values, "step": number}) for number in range(plan.steps)]
    job = replace(sample_job(catalogue), nodes="node1")
    sample_run = EndedRun(RunFolder(Path("run")), new_record(plan, ()), conclude(RunEvidence(plan, steps)))
    return {
        "run": run_document(sample_run),
        "memory": RunMemory(recipe, sample_memory(), [Remedy("", 1.0, "", 1.0)]).to_dict(),
        "predict": sample_foreseen(catalogue, recipe).to_dict(),
        "plan": sample_proposed(catalogue, recipe).to_dict(),
        "runs": jobs_document([job], 1, "runs"),
        "jobs list": jobs_document([job], 1),
        "watch": sample_watched(plan),
        "parse": parse_document(parse_report([Path()], "last", sample_parsed_runs(plan), full_names=False)),
        "judge": sample_judgement(),
        "compare": sample_comparison(),
        "bench": sample_measurements(),
        "bench list": sample_history(),
        "bench gpus": sample_gpus(),
        "bench collectives --pairwise": sample_pairs(),
        "config check": checked_document(
            Path("suite"),
            [CheckedFile(launch_scripts()[0], "launch.sh", "as released")],
            Path("own"),
            [UserFile("models/mine.yaml", ("mine.yaml:1: wrong",))],
        ),
        "config show": settings_document(sample_settings()),
        "doctor": sample_doctor(),
        "doctor --against": sample_drift(),
        "install": sample_installation(),
        "prepare access": access_document([sample_access()], "environment"),
        "prepare image": image_document(sample_image(), "pyxis"),
    }


def sample_foreseen(catalogue: Catalogue, recipe: Recipe) -> RunPrediction:
    plan = make_plan(recipe, Choices(), device="cuda")
    usual, gpu = default_calibration(catalogue.rates), catalogue.gpus[recipe.gpu_type]
    return RunPrediction(predict(plan, gpu, usual, catalogue.rates.errors), estimate(plan))


def sample_proposed(catalogue: Catalogue, recipe: Recipe) -> LayoutPlan:
    foreseen = sample_foreseen(catalogue, recipe)
    assert isinstance(foreseen.memory, MemoryUse)
    own = Candidate(foreseen.prediction, foreseen.memory)
    return LayoutPlan("step", recipe, {"tp": 1}, (own,), own, 1, {"do not fit": 1}, 1.0)


def sample_memory() -> MemoryUse:
    collective = CollectiveCount(kind="all_gather", group="tp", count=1, bytes=1)
    owners = dict.fromkeys(OWNERS, 1)
    rank = RankAccount(
        rank=0,
        pp_stage=0,
        peak_bytes=5,
        bytes_by_owner=owners,
        flops=1,
        flops_by_kind={"bf16": 1},
        collectives=(collective,),
    )
    return MemoryUse(capacity_gib=80.0, assumptions=("each sequence is one document",), ranks=(rank,))


def sample_doctor() -> Mapping[str, Any]:
    check = Check(name="gpu_count", status="fail", value="7 of 8", advice="")
    left_out = NotChecked(name="gpu_mig", reason="")
    node = NodeReport(node="node1", checked_at="", status="fail", checks=(check,), not_checked=(left_out,))
    result = NodesResult(started_at="", reports=(node,))
    return checked_nodes_document(result, "", find_scheduler("slurm").host_list)


def sample_drift() -> Mapping[str, Any]:
    drift = Drift(node="node1", key="sysctl.vm.swappiness", before="1", after="60", important=True)
    found = DriftReport(
        against="run fast",
        saved_at=None,
        nodes=("node1",),
        unknown_nodes=(),
        not_read={},
        missing={"bios": ""},
        drift=(drift,),
    )
    return found.model_dump(mode="json")


def sample_installation() -> Mapping[str, Any]:
    answers = Answers(environment="venv", workloads=("pretrain_llama3.1",))
    job = {"job_id": "1", "cluster": None, "run_dir": "", "script": "", "submitted_at": ""}
    return install_document(answers, Path("/install"), [StepResult("folders", "done", "")], [job], [("", "llmb list")])


def sample_image() -> ImportedImage:
    return ImportedImage(path=Path("nvidia+nemo+26.04.01.sqsh"), bytes=1, made=True)


def sample_settings() -> SettingsInEffect:
    setting = Setting("slurm.account", "research", "cluster", "cluster_config.yaml:1")
    file = SettingsFile(Path("cluster_config.yaml"))
    return SettingsInEffect(install_root=setting, files=(file,), settings=(setting,), variables=(setting,))


def sample_watched(plan: Plan) -> Mapping[str, Any]:
    steps = tuple(StepNews(number, 1.0, 5.0) for number in range(12))
    pace = find_pace(steps)
    seen = RunView(
        at_s=0.0,
        state="running",
        reason=None,
        nodes=None,
        attempt=1,
        done=12,
        total=plan.steps,
        steps=steps,
        since_last_s=0.0,
        limit_left_s=None,
        pace=pace,
        remaining_s=1.0,
        comparison=compare_with(Expected(step_time_s=1.0, source="", tolerance_pct=3.0), pace),
    )
    return watch_document(sample_job(Catalogue()), plan, seen, None)


def sample_parsed_runs(plan: EnginePlan) -> tuple[AnalyzedRun, ...]:
    """Also by a coarse clock."""
    log = ParsedFile(Path("log.out"), LogOutcome("success", "", step_time_s=describe([17.2]), loss_first=12.81))
    times = describe_means([17.0], [2], 0.5)
    coarse = ParsedFile(Path("clock.out"), LogOutcome("success", "", step_time_s=times, clock_error_s=0.5))
    recorded = run_with_times([], mfu_pct=dict.fromkeys(("published", "full"), 50.0), record=new_record(plan, ()))
    return recorded.configured({"layout.tp": 1}).with_outcome(log), run_with_times([]).with_outcome(coarse)


def sample_access() -> RepositoryAccess:
    repository = NeededRepository("meta-llama/Meta-Llama-3-70B", "model", "", ("",))
    return RepositoryAccess(repository, "granted")


def sample_job(catalogue: Catalogue) -> Job:
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=8)
    order = make_order(catalogue, request, Choices(), JobOptions(), Site(install=Path("/install")))
    folder = RunFolder(Path("run"))
    record = queued_record(order.plan, ()).model_copy(update={"run_id": "5afbddee3644b1b4"})
    return new_job(Prepared(order.sample(), folder, row_of_record(record)), "")


def sample_plan(catalogue: Catalogue) -> EnginePlan:
    request = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=2)
    return make_plan(resolve(catalogue, request), Choices(), device="cpu")


def sample_recipe(catalogue: Catalogue) -> Recipe:
    return resolve(catalogue, Request(workload="pretrain_llama3.1", size="405b", scale=576, release="24.11"))
