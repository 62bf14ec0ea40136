# SPDX-License-Identifier: Apache-2.0
"""The steps and ranks of a run that are profiled, and the profiler. Pure."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from llmb.base.options import RANKS, Option, Span, numbers_of, parse_ranges
from llmb.catalogue.published import DocumentProfile
from llmb.catalogue.records import Record

Profiler = Literal["nsys", "torch"]
NCCL_TRACE_STEPS = 5
MOST_RANKS = 8
"""Maximum number of ranks, from rank 0, that are profiled by default."""
_option = partial(Option, panel="Profiling")


class Profile(Record):
    """The resolved profiling options of one run, saved with its results. Statistics exclude the profiled steps."""

    profiler: Profiler
    or_torch: bool = False
    """True if the PyTorch profiler replaces Nsight Systems when the latter is not on the PATH."""
    reason: str | None = None
    """The reason why the PyTorch profiler has replaced Nsight Systems; None if it has not."""
    first_step: int
    stop_step: int
    """The first step after the profile."""
    ranks: tuple[int, ...]
    gpu_metrics: bool = False
    """True to record metrics of the first profiled rank's GPU."""

    def covers(self, step: int) -> bool:
        return self.first_step <= step < self.stop_step


class Profiling(Record):
    """The profiling options of a run. None means a default that depends on the recipe's document, steps and ranks."""

    profile: Annotated[
        bool, _option(basic=True, help="Profile some steps, and break down one step's time.", envvar="ENABLE_PROFILE")
    ] = False
    profiler: Annotated[
        Literal["auto", "nsys", "torch"],
        _option(
            help="Profiler: nsys (Nsight Systems; GPUs only) or torch (PyTorch's). auto: nsys on GPUs, but torch with"
            " torchtitan, or if nsys is not on the PATH where llmb's engine runs."
        ),
    ] = "auto"
    profile_start_step: Annotated[
        int | None,
        _option(
            help="First profiled step, counted from 0. Default: 20 or 45, as in the recipe's document, if the run has"
            " these steps; otherwise, and with torchtitan, the start of the last tenth of the steps.",
            minimum=0,
            envvar="PROFILE_START_STEP",
        ),
    ] = None
    profile_stop_step: Annotated[
        int | None,
        _option(
            help="First step after the profile, and default for --steps unless the run resumes. Default: 25, 30 or 50,"
            " as in the recipe's document, if the run has these steps; otherwise, and with torchtitan, its end.",
            minimum=1,
            envvar="PROFILE_STOP_STEP",
        ),
    ] = None
    profile_ranks: Annotated[
        str | None,
        _option(help="Ranks to profile, such as 0,4-7. Default: the first 8.", form=RANKS, envvar="PROFILE_RANKS"),
    ] = None
    profile_gpu_metrics: Annotated[
        bool,
        _option(
            help="With --profile, let nsys also sample the first profiled rank's GPU; drivers may require root.",
            envvar="ENABLE_GPU_METRICS",
        ),
    ] = False
    nccl_trace: Annotated[
        bool,
        _option(
            help="Keep NCCL's log of every collective in every step; --steps is then 5 by default, or 1 with"
            " --load-checkpoint. GPUs only.",
            envvar="ENABLE_NCCLTRACE",
        ),
    ] = False

    def steps_of(self, documented: DocumentProfile | None) -> int | None:
        """Return the number of steps that profiling implies if --steps is not specified; None if it implies none."""
        if self.nccl_trace:
            return NCCL_TRACE_STEPS
        if not self.profile or self.profile_stop_step is not None:
            return self.profile_stop_step if self.profile else None
        return documented.stop if documented and (self.profile_start_step or 0) < documented.stop else None

    def settled(
        self, device: str, steps: int, first_step: int, ranks: int, documented: DocumentProfile | None
    ) -> Profile | None:
        """Return the resolved options; None if the run is not profiled. Call this only if there are no ``problems``."""
        if not self.profile:
            return None
        start, stop = self._span(steps, first_step, documented)
        on_gpu = device == "cuda" and self.profiler != "torch"
        return Profile(
            profiler="nsys" if on_gpu else "torch",
            or_torch=on_gpu and self.profiler == "auto",
            first_step=start,
            stop_step=stop,
            ranks=tuple(range(min(ranks, MOST_RANKS))) if self.profile_ranks is None else listed(self.profile_ranks),
            gpu_metrics=self.profile_gpu_metrics,
        )

    def _span(self, steps: int, first_step: int, documented: DocumentProfile | None) -> tuple[int, int]:
        start, stop, end = self.profile_start_step, self.profile_stop_step, first_step + steps
        if documented and stop is None:
            fits = first_step <= (documented.start if start is None else start) < documented.stop <= end
            stop = documented.stop if fits else None
        if documented and start is None and stop is not None and first_step <= documented.start < stop:
            start = documented.start
        stop = end if stop is None else stop
        tenth = max(first_step, min(first_step + 9 * steps // 10, stop - 1))
        return (tenth if start is None else start), stop

    def problems(
        self, device: str, steps: int, first_step: int, ranks: int, documented: DocumentProfile | None
    ) -> Iterator[str]:
        """Yield reasons why the options are contradictory, or do not fit the run's device, steps and ranks."""
        if self.nccl_trace and self.profile:
            yield "--nccl-trace and --profile are mutually exclusive: each slows down what the other measures"
        if self.nccl_trace and device == "cpu":
            yield "--nccl-trace needs GPUs: on a CPU, ranks communicate with gloo, which writes no such log"
        if not self.profile:
            yield from self._without_profile()
            return
        if self.profiler == "nsys" and device == "cpu":
            yield "--profiler nsys needs GPUs; on a CPU, use the PyTorch profiler, --profiler torch"
        if self.profile_gpu_metrics and (self.profiler == "torch" or device == "cpu"):
            yield "--profile-gpu-metrics needs Nsight Systems, on GPUs; omit the option"
        if self.profile_ranks is not None:
            yield from _rank_problems(self.profile_ranks, ranks)
        profile = self.model_copy(update={"profile_ranks": None}).settled(device, steps, first_step, ranks, documented)
        if profile and not first_step <= profile.first_step < profile.stop_step <= first_step + steps:
            yield (
                f"--profile-start-step {profile.first_step} and --profile-stop-step {profile.stop_step} do not fit:"
                f" the steps are numbered {first_step}-{first_step + steps - 1}, and the stop step is not profiled"
            )

    def _without_profile(self) -> Iterator[str]:
        for name in ("profile_start_step", "profile_stop_step", "profile_ranks", "profile_gpu_metrics"):
            if getattr(self, name) not in (None, False):
                yield f"--{name.replace('_', '-')} needs --profile"


def listed(ranks: str) -> tuple[int, ...]:
    """Return the ranks in a string such as ``0,4-7``, sorted."""
    return tuple(sorted(set(numbers_of(parse_ranges(ranks)))))


def _rank_problems(text: str, ranks: int) -> Iterator[str]:
    spans = _spans(text)
    last = max((span.last for span in spans), default=0)
    if not spans:
        yield f"--profile-ranks is '{text}'; specify ranks such as 0,4-7"
    elif last >= ranks:
        yield f"--profile-ranks contains rank {last}, but the run's last rank is {ranks - 1}"


def _spans(text: str) -> tuple[Span, ...]:
    try:
        return parse_ranges(text)
    except ValueError:
        return ()
