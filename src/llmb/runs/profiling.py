# SPDX-License-Identifier: Apache-2.0
"""The steps and ranks of a run that are profiled, and the profiler. Pure."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from llmb.catalogue.records import Record
from llmb.options.forms import RANKS
from llmb.options.option import Option
from llmb.options.ranges import Span, numbers_of, parse_ranges

Profiler = Literal["nsys", "torch"]
NCCL_TRACE_STEPS = 5
MOST_RANKS = 8
"""Ranks that are profiled by default: those of the first node."""
_option = partial(Option, panel="Profiling")


class Profile(Record):
    """The resolved profiling of one run. Its results report it and leave the profiled steps out."""

    profiler: Profiler
    first_step: int
    stop_step: int
    """The first step that is no longer profiled."""
    ranks: tuple[int, ...]
    gpu_metrics: bool = False
    """Only for the first of the ranks."""

    def covers(self, step: int) -> bool:
        return self.first_step <= step < self.stop_step


class Profiling(Record):
    """The profiling options of a run. None means a default that depends on the number of steps and ranks."""

    profile: Annotated[
        bool, _option(help="Profile some steps, and show where the time of one went.", envvar="ENABLE_PROFILE")
    ] = False
    profiler: Annotated[
        Literal["auto", "nsys", "torch"],
        _option(
            help="nsys (Nsight Systems; GPUs only) or torch (PyTorch's profiler). auto: nsys where it is on the PATH."
        ),
    ] = "auto"
    profile_start_step: Annotated[
        int | None,
        _option(
            help="First step profiled, from 0. Default: the last tenth of the steps, 45 of 50.",
            minimum=0,
            envvar="PROFILE_START_STEP",
        ),
    ] = None
    profile_stop_step: Annotated[
        int | None,
        _option(
            help="First step no longer profiled. Default: the end; without --steps also the number of steps.",
            minimum=1,
            envvar="PROFILE_STOP_STEP",
        ),
    ] = None
    profile_ranks: Annotated[
        str | None,
        _option(help="Ranks profiled, such as 0,4-7. Default: the first 8.", form=RANKS, envvar="PROFILE_RANKS"),
    ] = None
    profile_gpu_metrics: Annotated[
        bool,
        _option(
            help="Nsight Systems also samples the GPU of the first rank profiled; drivers may allow this to root only.",
            envvar="ENABLE_GPU_METRICS",
        ),
    ] = False
    nccl_trace: Annotated[
        bool,
        _option(
            help="Keep NCCL's log of every collective; 5 steps unless --steps says otherwise. GPUs only.",
            envvar="ENABLE_NCCLTRACE",
        ),
    ] = False

    def steps_of(self) -> int | None:
        """The number of steps of the run that profiling implies, if none is specified."""
        if self.nccl_trace:
            return NCCL_TRACE_STEPS
        return self.profile_stop_step if self.profile else None

    def settled(self, device: str, steps: int, first_step: int, ranks: int) -> Profile | None:
        """The options resolved, by default to the last tenth of the steps; call only if ``problems`` finds none."""
        if not self.profile:
            return None
        stop = first_step + steps if self.profile_stop_step is None else self.profile_stop_step
        default = max(first_step, min(first_step + 9 * steps // 10, stop - 1))
        return Profile(
            profiler="nsys" if self.profiler == "nsys" and device == "cuda" else "torch",
            first_step=default if self.profile_start_step is None else self.profile_start_step,
            stop_step=stop,
            ranks=tuple(range(min(ranks, MOST_RANKS))) if self.profile_ranks is None else listed(self.profile_ranks),
            gpu_metrics=self.profile_gpu_metrics,
        )

    def problems(self, device: str, steps: int, first_step: int, ranks: int) -> Iterator[str]:
        """Why a run of ``steps`` steps from ``first_step`` on ``ranks`` ranks cannot be profiled with these options."""
        if self.nccl_trace and self.profile:
            yield "--nccl-trace and --profile are mutually exclusive: each slows down what the other measures"
        if self.nccl_trace and device == "cpu":
            yield "--nccl-trace needs GPUs: on a CPU ranks communicate with gloo, which writes no such log"
        if not self.profile:
            yield from self._without_profile()
            return
        if self.profiler == "nsys" and device == "cpu":
            yield "--profiler nsys needs GPUs; on a CPU use the PyTorch profiler, --profiler torch"
        if self.profile_gpu_metrics and self.profiler != "nsys":
            yield "--profile-gpu-metrics needs Nsight Systems; put 'nsys' on the PATH, or leave the option out"
        if self.profile_ranks is not None:
            yield from _rank_problems(self.profile_ranks, ranks)
        profile = self.model_copy(update={"profile_ranks": None}).settled(device, steps, first_step, ranks)
        if profile and not first_step <= profile.first_step < profile.stop_step <= first_step + steps:
            yield (
                f"--profile-start-step {profile.first_step} and --profile-stop-step {profile.stop_step} do not fit:"
                f" the steps are numbered {first_step}-{first_step + steps - 1}, and the stop step is not profiled"
            )

    def _without_profile(self) -> Iterator[str]:
        for name in ("profile_start_step", "profile_stop_step", "profile_ranks"):
            if getattr(self, name) is not None:
                yield f"--{name.replace('_', '-')} needs --profile"


def listed(ranks: str) -> tuple[int, ...]:
    """The ranks in a text such as ``0,4-7``, sorted."""
    return tuple(sorted(set(numbers_of(parse_ranges(ranks)))))


def _rank_problems(text: str, ranks: int) -> Iterator[str]:
    spans = _spans(text)
    last = max((span.last for span in spans), default=0)
    if not spans:
        yield f"--profile-ranks is '{text}'; give ranks such as 0,4-7"
    elif last >= ranks:
        yield f"--profile-ranks names rank {last}, but the {ranks} ranks are numbered 0-{ranks - 1}"


def _spans(text: str) -> tuple[Span, ...]:
    """Empty where the text names no ranks."""
    try:
        return parse_ranges(text)
    except ValueError:
        return ()
