# SPDX-License-Identifier: Apache-2.0
"""Profiles a rank in the steps of the plan, and marks where steps begin and end in its NCCL log."""

import errno
import gzip
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from llmb.base.errors import EnvironmentProblem
from llmb.base.scratch import scratch_folder
from llmb.engine.device import synchronize
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.watchdog import Progress
from llmb.readers.profiles import NCCL_STEPS_END
from llmb.runs.experiment import probe
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.trace_reports import nccl_log, profile_file


class StepProfiler:
    """Profiles this rank's steps; enter ``step`` around each training step."""

    def __init__(self, plan: Plan, folder: RunFolder, ranks: Ranks, progress: Progress) -> None:
        self.plan = plan
        self.ranks = ranks
        self.progress = progress
        self.recorder: NsysRecorder | TorchRecorder | None = None
        """Started before the first profiled step, and stopped after the last; None if this rank is not profiled."""
        if plan.profile is not None and ranks.rank in plan.profile.ranks:
            of_torch = plan.profile.profiler != "nsys"
            trace = profile_file(folder, plan, ranks.rank)
            self.recorder = TorchRecorder(trace, ranks.device) if of_torch else NsysRecorder()
        self.nccl_log = NcclTrace(nccl_log(folder, ranks.rank)) if plan.nccl_trace else None
        self.recording = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record a step, or its place in the NCCL log, if the plan requires it."""
        wanted = self.plan.profile
        if self.nccl_log:
            with self.nccl_log.step(number):
                yield
            return
        if wanted is None or not wanted.covers(number):
            yield
            return
        if not self.recording:
            # A GPU may still work on kernels that the steps before launched.
            synchronize(self.ranks.device)
            self.recording = True
            if self.recorder:
                self.recorder.start()
        on_gpu = self.ranks.device.type == "cuda"
        range_of_step = torch.cuda.nvtx.range(f"step {number}") if on_gpu else nullcontext()
        with record_function(f"ProfilerStep#{number}"), range_of_step:
            yield
        if number == wanted.stop_step - 1:
            self.close()

    def close(self) -> None:
        """Stop the recording, if any, and wait for all ranks: otherwise some would be slow in the next step."""
        if not self.recording:
            return
        self.recording = False
        self.progress.enter("profile", self.progress.position.step)
        synchronize(self.ranks.device)
        if self.recorder:
            try:
                self.recorder.stop()
            except (OSError, RuntimeError) as error:
                sys.stderr.write(f"llmb: rank {self.ranks.rank} could not write its profile: {error}\n")
        dist.barrier()


class TorchRecorder:
    """Writes a trace of the PyTorch profiler; raises EnvironmentProblem if its folder or that for temporary files is
    not writable."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(activities=activities)
        try:  # the trace is written after the profiled steps, by way of a temporary folder
            path.parent.mkdir(exist_ok=True)
            probe(path.parent)
            probe(Path(gettempdir()))
        except OSError as error:
            do = "free some space there, or make it writable; for temporary files, TMPDIR can name another folder"
            what = f"the profile cannot be written: {error.strerror}"
            raise EnvironmentProblem(what, where=str(error.filename or path.parent), do=do) from error

    def start(self) -> None:
        self.profile.start()

    def stop(self) -> None:
        self.profile.stop()
        partial = self.path.with_name(f".{self.path.name}")
        try:
            # torch could compress it too, but on a full disk reports no error and leaves an empty trace behind.
            with scratch_folder("llmb-profile-") as folder:
                whole = folder / "trace.json"
                self.profile.export_chrome_trace(str(whole))
                pack(whole, partial)
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)


def pack(whole: Path, packed: Path) -> None:
    """Compress a trace; raise OSError if it is missing or empty, because torch reports no error if writing fails."""
    if not whole.exists() or not whole.stat().st_size:
        raise OSError(errno.EIO, "torch wrote no trace; set TMPDIR to a folder with more space", str(whole.parent))
    with whole.open("rb") as source, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source, target)


class NsysRecorder:
    """Starts and stops the recording of Nsight Systems, which this process runs under."""

    def start(self) -> None:
        torch.cuda.cudart().cudaProfilerStart()

    def stop(self) -> None:
        torch.cuda.cudart().cudaProfilerStop()


class NcclTrace:
    """Records the size of this rank's NCCL log when each step begins and ends: log lines lack the step."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.steps = log.with_suffix(NCCL_STEPS_END)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self._note(number)
        yield
        self._note("end")

    def _note(self, place: int | str) -> None:
        size = self.log.stat().st_size if self.log.exists() else 0
        with self.steps.open("a") as stream:
            stream.write(f"{place} {size}\n")
