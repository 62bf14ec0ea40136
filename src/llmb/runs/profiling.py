# SPDX-License-Identifier: Apache-2.0
"""The steps and ranks of a run that are profiled, and the profiler. Pure."""

import re
from collections.abc import Iterator
from typing import Literal

from llmb.catalogue.records import Record

Profiler = Literal["nsys", "torch"]
NCCL_TRACE_STEPS = 5
MOST_RANKS = 8
"""Ranks that are profiled by default: those of the first node."""
_RANKS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)


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

    profile: bool = False
    profiler: Literal["auto", "nsys", "torch"] = "auto"
    profile_start_step: int | None = None
    profile_stop_step: int | None = None
    profile_ranks: str | None = None
    profile_gpu_metrics: bool = False
    nccl_trace: bool = False

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
    found: set[int] = set()
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _rank_problems(text: str, ranks: int) -> Iterator[str]:
    named = listed(text) if _RANKS.fullmatch(text) else ()
    if not named:
        yield f"--profile-ranks is '{text}'; give ranks such as 0,4-7"
    elif named[-1] >= ranks:
        yield f"--profile-ranks names rank {named[-1]}, but the {ranks} ranks are numbered 0-{ranks - 1}"
