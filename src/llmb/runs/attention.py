# SPDX-License-Identifier: Apache-2.0
"""Which of torch's attention kernels a run uses, and why. Pure."""

from collections.abc import Callable, Sequence
from typing import Literal

from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.runs.device import Device

AttentionBackend = Literal["flash", "cudnn", "efficient", "math"]
AttentionChoice = Literal["auto", "flash", "cudnn", "efficient", "math"]
BACKENDS: dict[Device, tuple[AttentionBackend, ...]] = {
    "cpu": ("flash", "math"),
    "cuda": ("flash", "cudnn", "efficient", "math"),
}
"""What torch has for a device. ``math`` is the last resort: it keeps the scores of all pairs of tokens."""


class Trial(Record):
    """What became of a backend that was tried at the run's shapes, forward and backward."""

    backend: AttentionBackend
    repeats_heads: bool = False
    """It does not take grouped heads, so that each key and value head is copied for every query head of its group."""
    milliseconds: float | None = None
    """Of all attention layers of the first rank for one micro-batch; null where it was not timed."""
    problem: str | None = None
    """Why it cannot be used; null if it can."""


class AttentionReport(Record):
    """The backend of a run, as ``run.json`` has it."""

    choice: AttentionChoice
    backend: AttentionBackend
    repeats_heads: bool
    why: str
    trials: tuple[Trial, ...]


def choice_problem(choice: AttentionChoice, device: Device) -> str | None:
    """Why a device cannot have the backend at all."""
    if choice == "auto" or choice in BACKENDS[device]:
        return None
    valid = ", ".join(("auto", *BACKENDS[device]))
    return f"--attention-backend {choice} needs a GPU; on a CPU valid are {valid}"


def try_backends(
    choice: AttentionChoice, device: Device, attempt: Callable[[AttentionBackend, bool], Trial]
) -> list[Trial]:
    """Trials of the backends that come into question; ``attempt`` makes one, and times it where its second input says.

    ``auto`` times all fused backends of a GPU. A CPU has but one, which keeps no scores: nothing to time.
    """
    if choice != "auto":
        return [attempt(choice, False)]
    *fused, last = BACKENDS[device]
    trials = [attempt(backend, device == "cuda") for backend in fused]
    return trials if able(trials) else [*trials, attempt(last, False)]


def select(choice: AttentionChoice, trials: Sequence[Trial]) -> AttentionReport:
    """The quickest backend of those that can be used.

    Raises UsageError where none can, with all reasons.
    """
    usable = able(trials)
    if not usable:
        reasons = "\n".join(f"  - {trial.backend}: {trial.problem}" for trial in trials)
        raise UsageError(
            f"--attention-backend {choice} cannot compute the attention of this run:\n{reasons}",
            do="leave --attention-backend out, or choose another",
        )
    best = min(usable, key=lambda trial: trial.milliseconds or 0.0)
    return AttentionReport(
        choice=choice,
        backend=best.backend,
        repeats_heads=best.repeats_heads,
        why=_why(choice, best, len(usable)),
        trials=tuple(trials),
    )


def able(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.problem is None]


def _why(choice: AttentionChoice, best: Trial, usable: int) -> str:
    if choice != "auto":
        return "chosen"
    if best.milliseconds is None:
        return "the only one that computes this run's attention" if best.backend == "math" else "the only fused one"
    return f"the quickest of {usable} that were timed" if usable > 1 else "the only fused one that can be used"


def problem_text(error: str, warnings: Sequence[str]) -> str:
    """Why torch refused a backend: what it warns of beside its error, but for backends that were switched off."""
    told = [warning.partition(" (Triggered internally")[0] for warning in warnings]
    reasons = [reason for reason in told if "runtime disabled" not in reason and "not used because" not in reason]
    return "; ".join(dict.fromkeys(reasons)) or error.partition("\n")[0]
