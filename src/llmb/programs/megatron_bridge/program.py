# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge behind the port of programs."""

import mmap
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe, Window
from llmb.errors import UsageError
from llmb.jobspec.node_setup import ContainerSettings
from llmb.jobspec.options import FrameworkOptions
from llmb.jobspec.variables import VariableLayer
from llmb.logs.formats.megatron import FORMAT, MegatronReader
from llmb.logs.outcome import FINISHED, LogOutcome, judge_log
from llmb.logs.reader import read_log
from llmb.metrics.statistics import Statistics
from llmb.metrics.window import STEADY
from llmb.missing import Missing
from llmb.predict.prediction import predicted_step
from llmb.programs.megatron_bridge.bridge_file import bridge_data
from llmb.programs.megatron_bridge.command import (
    bridge_command,
    bridge_origin,
    bridge_plan,
    bridge_variables,
    trains_packed,
)
from llmb.programs.megatron_bridge.squad import OFFLINE, prepared_squad
from llmb.programs.megatron_bridge.versions import check_image
from llmb.programs.nsys import export_report
from llmb.programs.port import End, Program, ProgramRequest, ProgramWork, StepsDone
from llmb.runs.choices import Choices
from llmb.runs.contradicting_record import why_contradicting
from llmb.runs.failure import ATTEMPT
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan, make_plan
from llmb.runs.profile_report import ProfileReport, report_profile
from llmb.runs.record import RunRecord
from llmb.runs.result import NOT_SUCCESSFUL, Loss, Result, Status, figures_of
from llmb.runs.step_follower import StepNews

SAVED = "train_state.pt"
"""Written into a checkpoint's folder, ``iter_<step>``, once it is complete (training/checkpointing.py)."""
NOT_SAMPLED = Missing("only runs of llmb's own engine are sampled")


def result_of_log(
    plan: Plan,
    outcome: LogOutcome,
    end: End,
    profile: ProfileReport | None = None,
    contradiction: str | None = None,
) -> Result:
    """The result of a run that ended as ``end`` says, and whose log is judged as ``outcome``.

    A framework that has done every step may still fail while it cleans up: the run is a success then.
    """
    status: Status = "success" if outcome.status in FINISHED else "invalid" if outcome.status == "invalid" else "failed"
    reasons = [outcome.reason]
    if status == "success" and contradiction:
        status, reasons = "invalid", [contradiction]
    if end.cause:
        reasons.append(f"ended by {end.cause}")
    elif end.exit_code:
        reasons.append(f"exit code {end.exit_code}")
    losses = (outcome.loss_first, outcome.loss_last)
    times = _statistics(plan, status, outcome)
    return Result(
        status=status,
        reason=None if status == "success" else "; ".join(reasons),
        steps=outcome.steps or 0,
        step_time_s=times,
        loss=None if None in losses or status == "invalid" else Loss(first=_known(losses[0]), last=_known(losses[1])),
        peak_memory_gib=None,
        window=outcome.window if times and outcome.window and outcome.window.rule == STEADY else None,
        profile=profile,
        resources=NOT_SAMPLED,
        other_work=NOT_SAMPLED,
        **(figures_of(plan, times.mean) if times else {}),
    )


def _statistics(plan: Plan, status: Status, outcome: LogOutcome) -> Statistics | Missing:
    """The log has the statistics of the window as a whole, without a step that was profiled or with it."""
    if status != "success":
        return NOT_SUCCESSFUL
    if outcome.window is None:
        return Missing(outcome.reason)
    window = [iteration - FORMAT.first_number for iteration in range(outcome.window.first, outcome.window.last + 1)]
    profiled = sum(plan.slows_down(step) for step in window)
    if profiled:
        return Missing(f"{profiled} of the {len(window)} steps of the window were profiled, which slows them down")
    return outcome.step_time_s or Missing(outcome.reason)


def is_done(folder: RunFolder, plan: Plan, outcome: LogOutcome) -> bool:
    """Whether every step is logged, and the last checkpoint is complete if one is requested."""
    if outcome.max_step is None or outcome.max_step - FORMAT.first_number < plan.last_step:
        return False
    last = folder.checkpoints_of(plan) / f"iter_{plan.last_step + 1:07d}" / SAVED
    return not plan.save_checkpoint or last.is_file()


def _known(loss: float | None) -> float:
    assert loss is not None
    return loss


LOG_RULES = ("auto", "last", "all")
"""Window rules that are resolved by what the log says of itself."""


def judge_latest_attempt(folder: RunFolder, window: Window) -> LogOutcome:
    """What the log shows of the latest start: steps of earlier ones do not count.

    The plan's window is in the numbers that the log prints, from 1: iterations 35-44, which NVIDIA's own parsers take.
    """
    first = FORMAT.first_number
    rule = window.rule if window.rule in LOG_RULES else f"{max(window.first, first)}-{max(window.last, first)}"
    try:
        with folder.log.open("rb") as stream:
            begin = _latest_attempt(stream.fileno())
            if not begin:
                return judge_log(read_log(stream, rule))
            stream.seek(begin)
            return judge_log(read_log(BytesIO(stream.read()), rule))
    except OSError as error:
        return LogOutcome("unreadable", f"the log cannot be read: {error.strerror}")


def _latest_attempt(handle: int) -> int:
    """Where in a log the latest attempt begins; 0 for the only one, and for an empty log."""
    try:
        with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as log:
            return log.rfind(f"\n{ATTEMPT}".encode()) + 1
    except ValueError:
        return 0


class NewLogSteps:
    """Reads the complete lines that were added to a log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.last = -1
        self.lines = MegatronReader()

    def new(self) -> Iterator[StepNews]:
        if not self.path.exists():
            return
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in self.lines.find(whole):
            if line.step != self.last:  # several ranks may log it
                self.last = line.step
                number = line.step - FORMAT.first_number
                yield StepNews(number, line.step_time_s, line.loss, line.grad_norm, line.tflops_per_gpu)


class MegatronBridge(Program):
    """Trains with the framework's performance script; what begins and ends the job runs outside of its container."""

    name = "megatron_bridge"

    def plan(
        self,
        catalogue: Catalogue,
        recipe: Recipe,
        choices: Choices,
        options: FrameworkOptions,
        install: Path,
    ) -> Plan:
        squad = None if choices.synthetic else prepared_squad(catalogue, recipe, install)
        origin, packed = bridge_origin(recipe, squad, options.arguments), trains_packed(squad, options.arguments)
        plan = bridge_plan(catalogue, recipe, choices, origin, packed=packed)
        check_image(options.image, recipe)
        predicted = predicted_step(catalogue, make_plan(recipe, Choices(), device="cuda"))
        return plan.model_copy(update={"predicted": predicted})

    def work(self, plan: Plan, asked: ProgramRequest, folder: RunFolder) -> ProgramWork:
        save_dir = str(folder.checkpoints_of(plan))
        squad = prepared_squad(Catalogue(), plan.recipe, asked.site.install)
        used = squad if squad and plan.origin.data.path == str(squad.root) else None
        return ProgramWork(
            command=tuple(bridge_command(plan, asked.choices, save_dir, asked.options.arguments, used)),
            start="task-per-gpu",
            container=bridge_container(asked.options, asked.site.config.container),
            control_in_container=False,
            variables=VariableLayer(self.name, {**bridge_variables(plan.recipe), **(OFFLINE if used else {})}),
            recipe_variables=False,
            title=f", with {self.name} {bridge_data().release}",
        )

    def started(self, plan: Plan) -> Plan:
        return plan

    def progress(self, folder: RunFolder, plan: Plan) -> StepsDone:
        outcome = judge_latest_attempt(folder, plan.window)
        return StepsDone(outcome.steps or 0, is_done(folder, plan, outcome))

    def new_steps(self, folder: RunFolder) -> NewLogSteps:
        return NewLogSteps(folder.log)

    def result(self, folder: RunFolder, record: RunRecord, end: End) -> Result:
        plan = record.plan
        profile = report_profile(folder, plan, export_report(plan, folder))
        outcome = judge_latest_attempt(folder, plan.window)
        return result_of_log(plan, outcome, end, profile, why_contradicting(record, (), log_gpus=outcome.gpus))


def bridge_container(options: FrameworkOptions, settings: ContainerSettings) -> ContainerSettings:
    """The framework's image, or the requested one. Raises UsageError if the cluster has no containers."""
    if settings.runtime == "none":
        do = "set 'container: {runtime: pyxis, image: ...}' (or apptainer) in cluster_config.yaml"
        raise UsageError(f"{MegatronBridge.name} runs in its container, and this cluster has none", do=do)
    image = options.image or bridge_data().images[settings.runtime]
    return settings.model_copy(update={"image": image, "mounts": (*settings.mounts, *options.mounts)})
