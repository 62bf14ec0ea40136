# SPDX-License-Identifier: Apache-2.0
"""Which steps and ranks of a run are profiled, and with what. Pure."""

import re
from collections.abc import Iterator
from typing import Literal

from llmb.catalogue.records import Record

Profiler = Literal["nsys", "torch"]
NCCL_TRACE_STEPS = 5
MOST_RANKS = 8
"""Ranks profiled unless the user says which: the first node's."""
_RANKS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)


class Profile(Record):
    """The profiling of one run, settled. Its results say so and leave the profiled steps out."""

    profiler: Profiler
    first_step: int
    stop_step: int
    """The first step that is not profiled any more."""
    ranks: tuple[int, ...]
    gpu_metrics: bool = False
    """Of the first of the ranks."""

    def covers(self, step: int) -> bool:
        return self.first_step <= step < self.stop_step


class Profiling(Record):
    """What a run chooses to have recorded of it. Null leaves a choice to the number of steps and of ranks."""

    profile: bool = False
    profiler: Literal["auto", "nsys", "torch"] = "auto"
    profile_start_step: int | None = None
    profile_stop_step: int | None = None
    profile_ranks: str | None = None
    profile_gpu_metrics: bool = False
    nccl_trace: bool = False

    def steps_of(self) -> int | None:
        """How many steps a run has because of it, where nobody says."""
        if self.nccl_trace:
            return NCCL_TRACE_STEPS
        return self.profile_stop_step if self.profile else None

    def settled(self, device: str, steps: int, first_step: int, ranks: int) -> Profile | None:
        """What ``problems`` finds nothing wrong with, settled: by default the last tenth of the steps."""
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
        """Why a run of ``steps`` steps from ``first_step`` on ``ranks`` ranks cannot be recorded this way."""
        if self.nccl_trace and self.profile:
            yield "--nccl-trace and --profile exclude each other: each would slow down what the other shows"
        if self.nccl_trace and device == "cpu":
            yield "--nccl-trace needs GPUs: on a CPU processes talk through gloo, which writes no such log"
        if not self.profile:
            yield from self._without_profile()
            return
        if self.profiler == "nsys" and device == "cpu":
            yield "--profiler nsys needs GPUs; on a CPU there is the PyTorch profiler, --profiler torch"
        if self.profile_gpu_metrics and self.profiler != "nsys":
            yield "--profile-gpu-metrics is for Nsight Systems; put 'nsys' on the PATH, or leave it out"
        if self.profile_ranks is not None:
            yield from _rank_problems(self.profile_ranks, ranks)
        profile = self.model_copy(update={"profile_ranks": None}).settled(device, steps, first_step, ranks)
        if profile and not first_step <= profile.first_step < profile.stop_step <= first_step + steps:
            yield (
                f"--profile-start-step {profile.first_step} and --profile-stop-step {profile.stop_step} do not fit:"
                f" the steps are numbered {first_step}-{first_step + steps - 1}, and the stop is profiled no more"
            )

    def _without_profile(self) -> Iterator[str]:
        for name in ("profile_start_step", "profile_stop_step", "profile_ranks"):
            if getattr(self, name) is not None:
                yield f"--{name.replace('_', '-')} is given, but nothing is profiled; add --profile"


def listed(ranks: str) -> tuple[int, ...]:
    """The ranks that a text such as ``0,4-7`` names, in order."""
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
