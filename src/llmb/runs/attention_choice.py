# SPDX-License-Identifier: Apache-2.0
"""Selects the attention backend and the FP8 product of a run, and describes why. Pure."""

from collections.abc import Callable, Sequence
from typing import Literal

from llmb.base.errors import UsageError
from llmb.catalogue.records import Record
from llmb.readers.samples.host import Device

ProductDtype = Literal["fp8", "fp32", "bf16"]
"""``fp8``: the device's own FP8 product. ``fp32``, ``bf16``: a product after an exact cast to that dtype."""


class Fp8Product(Record):
    """How a run multiplies FP8 values, as saved in ``run.json``."""

    dtype: ProductDtype
    why: str


def fp8_product(device: Device, *, emulate: bool) -> Fp8Product:
    """Select how a run multiplies FP8 values; with ``emulate``, in a way that every GPU supports."""
    if device == "cpu":
        return Fp8Product(dtype="fp32", why="FP8 values as fp32: fast on every CPU")
    if emulate:
        return Fp8Product(dtype="bf16", why="FP8 values as bf16, as set by --emulate-fp8")
    return Fp8Product(dtype="fp8", why="the GPU's own product")


AttentionBackend = Literal["varlen", "flash", "flash3", "flash4", "cudnn", "efficient", "math"]
AttentionChoice = Literal["auto", "varlen", "flash", "flash3", "flash4", "cudnn", "efficient", "math"]
BACKENDS: dict[Device, tuple[AttentionBackend, ...]] = {
    "cpu": ("varlen", "flash", "math"),
    "cuda": ("varlen", "flash", "flash3", "flash4", "cudnn", "efficient", "math"),
}
"""The backends of each device.

``varlen`` is for packed sequences only; ``math`` keeps the scores of all pairs of tokens.
"""
NOT_DETERMINISTIC = ("cudnn",)
"""Backends that torch refuses to use with deterministic algorithms."""


class Trial(Record):
    """The result of trying a backend at the shapes of a run or a benchmark, forward and backward."""

    backend: AttentionBackend
    repeats_heads: bool = False
    """True if each KV head is copied for every query head of its group."""
    milliseconds: float | None = None
    """Time of the first rank's attention layers for one micro-batch, or of a benchmark's call; None if not timed."""
    distance: float | None = None
    """The largest distance of a result or gradient from the exact one, relative to its norm; None if not compared."""
    problem: str | None = None
    """The reason why the backend cannot be used; None if it can."""


class AttentionReport(Record):
    """The selected backend and the trials; for a run, saved in ``run.json``."""

    choice: AttentionChoice
    backend: AttentionBackend
    repeats_heads: bool
    why: str
    trials: tuple[Trial, ...]


def choice_problem(choice: AttentionChoice, device: Device, *, deterministic: bool = False) -> str | None:
    """Return why the backend is unsupported on a device, or with deterministic algorithms; None if it is supported."""
    if deterministic and choice in NOT_DETERMINISTIC:
        return f"--attention-backend {choice} has no deterministic backward pass; omit it, or --deterministic"
    if choice == "auto" or choice in BACKENDS[device]:
        return None
    return f"--attention-backend {choice} needs a GPU; valid on a CPU: {', '.join(('auto', *BACKENDS[device]))}"


def try_backends(
    choice: AttentionChoice,
    device: Device,
    attempt: Callable[..., list[Trial]],
    *,
    packed: bool = False,
    deterministic: bool = False,
) -> list[Trial]:
    """Try the backends that ``choice`` allows with ``attempt``, whose last argument is True to time them."""
    if choice != "auto":
        return attempt(choice, False)
    excluded = (*(() if packed else ("varlen",)), *(NOT_DETERMINISTIC if deterministic else ()))
    *fused, last = [backend for backend in BACKENDS[device] if backend not in excluded]
    times = device == "cuda" and not deterministic
    trials = list[Trial]()
    for backend in fused:
        trials += attempt(backend, times)
        if not times and able(trials):
            break
    return trials if able(trials) else [*trials, *attempt(last, False)]


def select(choice: AttentionChoice, trials: Sequence[Trial]) -> AttentionReport:
    """Select the fastest usable backend, or the first if not timed; raise UsageError with reasons if none is usable."""
    usable = able(trials)
    if not usable:
        reasons = "\n".join(f"  - {trial.backend}: {trial.problem}" for trial in trials)
        who = "no attention backend can" if choice == "auto" else f"attention backend {choice} cannot"
        do = None if choice == "auto" else "omit --attention-backend, or pass another backend"
        raise UsageError(f"{who} compute this attention:\n{reasons}", do=do)
    best = min(usable, key=lambda trial: trial.milliseconds or 0.0)
    why = _why(choice, best, usable)
    return AttentionReport(
        choice=choice, backend=best.backend, repeats_heads=best.repeats_heads, why=why, trials=tuple(trials)
    )


def able(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.problem is None]


def _why(choice: AttentionChoice, best: Trial, usable: Sequence[Trial]) -> str:
    if choice != "auto":
        return "chosen"
    if best.milliseconds is None and best.backend == "varlen":
        return "varlen skips pairs of tokens of different documents"
    if best.milliseconds is None:
        return "the only one that computes this run's attention" if best.backend == "math" else "the first fused one"
    several = len({trial.backend for trial in usable})
    why = f"the fastest of {several} that were timed" if several > 1 else "the only fused one that can be used"
    for other in (trial for trial in usable if trial.backend == best.backend and trial is not best):
        heads = "repeated" if other.repeats_heads else "grouped"
        why += f"; with {heads} heads it takes {other.milliseconds:.3g} ms instead of {best.milliseconds:.3g} ms"
    return why


def problem_text(error: str, warnings: Sequence[str]) -> str:
    """Return why torch rejected a backend: its warnings, except warnings about disabled backends, or else its error."""
    messages = (warning.partition(" (Triggered internally")[0] for warning in warnings)
    reasons = [reason for reason in messages if "runtime disabled" not in reason and "not used because" not in reason]
    return "; ".join(dict.fromkeys(reasons)) or error.partition("\n")[0]
