# SPDX-License-Identifier: Apache-2.0
"""The result of a run of Megatron-Bridge, from its log."""

from llmb.logs.formats.megatron import FORMAT
from llmb.logs.outcome import FINISHED, LogOutcome
from llmb.metrics.window import STEADY
from llmb.programs.port import End
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.profile_report import ProfileReport
from llmb.runs.result import Loss, Result, Status, figures_of

SAVED = "train_state.pt"
"""Written into a checkpoint's folder, ``iter_<step>``, once it is complete (training/checkpointing.py)."""
NOT_SAMPLED = "only runs of llmb's own engine are sampled"


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
    no_statistics = _no_statistics(plan, status, outcome)
    times = None if no_statistics else outcome.step_time_s
    return Result(
        status=status,
        reason=None if status == "success" else "; ".join(reasons),
        steps=outcome.steps or 0,
        step_time_s=times,
        loss=None if None in losses or status == "invalid" else Loss(first=_known(losses[0]), last=_known(losses[1])),
        peak_memory_gib=None,
        step_time_reason=no_statistics,
        window=outcome.window if times and outcome.window and outcome.window.rule == STEADY else None,
        profile=profile,
        resources_reason=NOT_SAMPLED,
        other_work_reason=NOT_SAMPLED,
        **(figures_of(plan, times.mean) if times else {}),
    )


def _no_statistics(plan: Plan, status: Status, outcome: LogOutcome) -> str | None:
    """The log has the statistics of the window as a whole, without a step that was profiled or with it."""
    if status != "success":
        return "the run was not successful"
    if outcome.window is None:
        return outcome.reason
    window = [iteration - FORMAT.first_number for iteration in range(outcome.window.first, outcome.window.last + 1)]
    profiled = sum(plan.slows_down(step) for step in window)
    if not profiled:
        return None if outcome.step_time_s else outcome.reason
    return f"{profiled} of the {len(window)} steps of the window were profiled, which slows them down"


def is_done(folder: RunFolder, plan: Plan, outcome: LogOutcome) -> bool:
    """Whether every step is logged, and the last checkpoint is complete if one is requested."""
    if outcome.max_step is None or outcome.max_step - FORMAT.first_number < plan.last_step:
        return False
    last = folder.checkpoints_of(plan) / f"iter_{plan.last_step + 1:07d}" / SAVED
    return not plan.save_checkpoint or last.is_file()


def _known(loss: float | None) -> float:
    assert loss is not None
    return loss
