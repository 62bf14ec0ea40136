# SPDX-License-Identifier: Apache-2.0
"""A training that is saved, killed and resumed: whether it goes on as if nothing had happened, and what that takes.

Both runs are those of ``llmb run``. They have a root of their own, so that the history shows none that was killed on
purpose.
"""

import ctypes
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import llmb
from llmb.bench.records import CheckpointTrial, Measurement, MeasurementFile, RepeatedStep
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Dtype
from llmb.catalogue.resolve import Request
from llmb.checkpoints.checkpoint import SavedCheckpoint, checkpoint_name, read_checkpoint
from llmb.checkpoints.times import CheckpointTime, read_checkpoint_times
from llmb.errors import EnvironmentProblem, RunFailed, UsageError, UserInterrupt
from llmb.health.checks.disk import IN_MEMORY, Mount, mount_of
from llmb.jobs.local_run import LocalRun, Say, plan_here, raise_unless_successful
from llmb.metrics.model_counts import checkpoint_bytes
from llmb.processes.signals import Interrupted, signals_as_exceptions
from llmb.programs.conclude import EndedRun
from llmb.runs.checkpoint_disk import check_room
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.host import host_name
from llmb.runs.record import now, read_record
from llmb.runs.steps import Step, StepNews, read_steps
from llmb.trust import STATE_FOLDER, check_links

RUNS = Path(STATE_FOLDER) / "bench_runs"
"""Below the root of installation, the root of these runs."""
UNTIL_KILLED = 100_000
"""Steps of the run that is killed: far more than are done until then, however quick they are and late it is noticed."""
VERSIONS = ("python", "torch", "cuda", "cudnn", "nccl", "driver")
AFTER = " after "
"""What follows in a run's reason are the steps that were planned, which mean nothing here."""
TOLERANCE = {Dtype.FP32: 1e-6, Dtype.BF16: 0.01, Dtype.FP8: 0.02}
"""How far losses may differ on a GPU, whose kernels may add in another order each time. On a CPU they do not."""
ELSEWHERE = "free some space there, or name a folder on another file system with --path"
OnStep = Callable[[StepNews], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """What to train, and where to save it. ``place`` is the user's folder; nothing in it is changed."""

    request: Request
    choices: Choices
    before: int
    after: int
    place: Path
    install: Path
    keep: bool
    command: tuple[str, ...]


@dataclass(slots=True)
class Kill:
    """Is asked whether the run is to be killed: once it is saved, and has trained far enough after that."""

    last_step: int
    on_step: OnStep
    trained: bool = False
    done: bool = False

    def step(self, step: StepNews) -> None:
        self.trained |= step.step >= self.last_step
        if step.step <= self.last_step:  # more are trained while a slow disk still takes the checkpoint
            self.on_step(step)

    def is_due(self, folder: RunFolder) -> bool:
        if self.trained and not self.done:
            self.done = any(time.kind == "save" for time in _times(folder))
            return self.done
        return False


@dataclass(frozen=True, slots=True)
class EndedTrial:
    """Both runs that ended, and what was found between them."""

    wanted: TrialRequest
    killed: EndedRun
    resumed: EndedRun
    saved: SavedCheckpoint
    free_bytes: int
    cached: str | None
    """Why the files were still in memory when they were loaded; None if they were not."""
    measured_at: str = field(default_factory=now)


def check_trial(wanted: TrialRequest) -> LocalRun:
    """The run that will be killed, before it has a folder of its own. Raises UsageError, EnvironmentProblem."""
    place = wanted.place
    if not place.is_dir():
        raise UsageError("there is no such folder", where=str(place), do="give --path a folder that exists")
    check_links(place)
    chosen = wanted.choices.model_copy(update={"steps": UNTIL_KILLED, "save_checkpoint": True, "resources": False})
    local = _saving_to(_local(wanted, chosen), place, wanted)
    plan = local.plan
    check_room("a checkpoint needs", checkpoint_bytes(plan.recipe.model, plan.lora), place, ELSEWHERE)
    local.check()
    return local


def run_trial(wanted: TrialRequest, local: LocalRun, on_step: OnStep, say: Say) -> EndedTrial:
    """Raises RunFailed if a run failed by itself, and UserInterrupt; the checkpoint is then removed."""
    free = shutil.disk_usage(wanted.place).free
    with _interruptible(), _own_folder(wanted, say) as folder:
        kill = Kill(wanted.before + wanted.after - 1, on_step)
        say(f"training to step {wanted.before}, saving, {wanted.after} more steps, then all ranks are killed")
        killed = _until_killed(_saving_to(local, folder, wanted), kill, say)
        saved = _survivor(killed, wanted)
        cached = drop_cache([saved.path / name for name in saved.record.files], _memory(wanted.place))
        say(f"resuming from {saved.path}, {'still' if cached else 'no longer'} in the page cache")
        resumed = _local(wanted, _resuming(wanted, killed, saved)).start(on_step, say)
        raise_unless_successful(resumed)
    return EndedTrial(wanted, killed, resumed, saved, free, cached)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raises UserInterrupt for a signal between the runs, and for one that ended a run."""
    try:
        with signals_as_exceptions() as gate:
            gate.let_through()
            yield
    except (Interrupted, UserInterrupt) as error:
        what = error.what.partition(AFTER)[0] if isinstance(error, UserInterrupt) else f"interrupted by {error}"
        raise UserInterrupt(what, do="its checkpoint was removed; the same command starts again") from error


@contextmanager
def _own_folder(wanted: TrialRequest, say: Say) -> Iterator[Path]:
    """A new folder in the user's, which is removed in the end, whatever happens, unless it is to be kept."""
    folder = wanted.place / f"llmb-bench-checkpoint-{host_name()}-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        do = "give --path a folder in which folders can be created"
        raise EnvironmentProblem(f"cannot write there: {error.strerror}", where=str(folder), do=do) from error
    finished = False
    try:
        yield folder
        finished = True
    finally:
        if finished and wanted.keep:
            say(f"the checkpoint is kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                say(f"warning: {folder} could not be removed")


def _local(wanted: TrialRequest, choices: Choices) -> LocalRun:
    """Planned with what is prepared in the user's root, and run in the one of these runs."""
    local = plan_here(Catalogue(), wanted.request, choices, os.environ, wanted.install)
    if local.missing:
        raise local.missing
    return replace(local, install=wanted.install / RUNS)


def _saving_to(local: LocalRun, folder: Path, wanted: TrialRequest) -> LocalRun:
    where = {"checkpoint_dir": str(folder), "saves_once_after": wanted.before}
    return replace(local, plan=local.plan.model_copy(update=where))


def _resuming(wanted: TrialRequest, killed: EndedRun, saved: SavedCheckpoint) -> Choices:
    """Verifying would read all files into memory before they are loaded.

    On a GPU the kernel of attention is chosen by measurement: the resumed run gets that of the other one.
    """
    environment = read_record(killed.folder).environment
    chosen = environment.attention if environment else None
    own = {"attention_backend": chosen.backend} if chosen and killed.plan.device == "cuda" else {}
    resumes = {"load_checkpoint": str(saved.path), "verify_checkpoint": False, "resources": False}
    return wanted.choices.model_copy(update={"steps": wanted.after, **resumes, **own})


def _until_killed(local: LocalRun, kill: Kill, say: Say) -> EndedRun:
    ended = local.start(kill.step, say, kill.is_due)
    if not kill.done:
        raise_unless_successful(ended)
        raise RunFailed("the run ended before it could be killed", where=str(ended.folder.log))
    return ended


def _survivor(killed: EndedRun, wanted: TrialRequest) -> SavedCheckpoint:
    """The checkpoint, by what is on the disk alone."""
    plan = killed.plan
    name = checkpoint_name(wanted.before, plan.samples_before(wanted.before))
    try:
        return read_checkpoint(killed.folder.checkpoints_of(plan) / name)
    except UsageError as error:
        what = f"the checkpoint did not survive that its ranks were killed: {error.what}"
        raise RunFailed(what, where=error.where) from error


def _times(folder: RunFolder) -> list[CheckpointTime]:
    return read_checkpoint_times(folder.checkpoint_times) if folder.checkpoint_times.exists() else []


def _mount(place: Path) -> Mount | None:
    mounts = Path("/proc/mounts")
    return mount_of(str(place.resolve()), mounts.read_text() if mounts.exists() else "")


def _memory(place: Path) -> str | None:
    mount = _mount(place)
    return mount.kind if mount and mount.kind in IN_MEMORY else None


def trial_of(trial: EndedTrial) -> CheckpointTrial:
    """What is kept of it."""
    save, load = (_last(run, kind) for run, kind in ((trial.killed, "save"), (trial.resumed, "load")))
    mount, plan = _mount(trial.wanted.place), trial.killed.plan
    tolerance = 0.0 if plan.device == "cpu" else TOLERANCE[plan.recipe.dtype]
    return CheckpointTrial(
        path=str(trial.wanted.place),
        file_system=mount and mount.kind,
        mounted_at=mount and mount.folder,
        source=mount and mount.device,
        free_bytes=trial.free_bytes,
        size_bytes=trial.saved.size_bytes,
        files=len(trial.saved.record.files),
        saved_after=trial.wanted.before,
        killed=(trial.killed.result.reason or "").partition(AFTER)[0].rstrip(","),
        save=save,
        load=load,
        cache="not dropped" if trial.cached else "dropped",
        cache_reason=trial.cached,
        steps=tuple(_repeated(trial)),
        tolerance=tolerance,
        runs=(str(trial.killed.folder.path), str(trial.resumed.folder.path)),
    )


def _last(run: EndedRun, kind: str) -> CheckpointTime:
    return next(time for time in reversed(_times(run.folder)) if time.kind == kind)


def _repeated(trial: EndedTrial) -> Iterator[RepeatedStep]:
    """Each step that both runs have; the killed one may have done more."""
    first = {step.step: step for step in read_steps(trial.killed.folder.steps)}
    for again in read_steps(trial.resumed.folder.steps):
        yield _pair(first[again.step], again)


def _pair(first: Step, again: Step) -> RepeatedStep:
    return RepeatedStep(
        step=first.step,
        loss=first.loss,
        resumed_loss=again.loss,
        grad_norm=first.grad_norm,
        resumed_grad_norm=again.grad_norm,
    )


def trial_file(trial: EndedTrial) -> MeasurementFile:
    """A row for each rank and direction, and one for all ranks, as other measurements are kept."""
    found, plan, environment = trial_of(trial), trial.killed.plan, read_record(trial.resumed.folder).environment
    versions = environment.model_dump(include=set(VERSIONS)) if environment else {}
    title = plan.recipe.title()
    rows = [*_rows(found, found.save, "save", title), *_rows(found, found.load, found.load_case, title)]
    return MeasurementFile(
        node=host_name(),
        measured_at=trial.measured_at,
        command=trial.wanted.command,
        software={"llmb": llmb.__version__, **versions},
        measurements=tuple(rows),
        recipe=title,
        checkpoint=found,
    )


def _rows(found: CheckpointTrial, time: CheckpointTime, case: str, title: str) -> Iterator[Measurement]:
    for rank, size, seconds in (
        (None, time.size_bytes, time.duration_s),
        *((each.rank, each.size_bytes, each.duration_s) for each in time.ranks),
    ):
        yield Measurement(
            benchmark="checkpoint",
            case=case,
            shape=title,
            size_bytes=size,
            node=host_name(),
            device=found.file_system_text,
            rank=rank,
            ranks=len(time.ranks),
            time_s=seconds,
            repetitions=1,
            bandwidth_gb_per_s=size / 1e9 / seconds if seconds else None,
        )


def raise_if_different(found: CheckpointTrial) -> None:
    """Raises RunFailed for a resumed run that is another training, with the first step that shows it."""
    step = found.first_difference
    if step is None:
        return
    allowed = f"at most {found.tolerance:g}" if found.tolerance else "none at all"
    raise RunFailed(
        f"the resumed run is another training. Step {step.step}: loss {step.loss!r} before and {step.resumed_loss!r} "
        f"resumed, gradient norm {step.grad_norm!r} and {step.resumed_grad_norm!r}; allowed difference: {allowed}",
        where=found.runs[1],
        do="what was saved, stored or loaded is not what was trained: repeat it on another file system",
    )


IN_PAGE_CACHE = b"\1"
"""What the kernel writes for a page that is there."""
WINDOW = 2**30
"""Bytes that are looked at together: more than a machine's memory might not be mapped at once."""
FEW = 0.01
"""A share of pages that changes no figure."""


def drop_cache(files: Sequence[Path], memory: str | None) -> str | None:
    """Why the files are still in memory; None if they are not. ``memory`` names a file system that has no disk."""
    if memory:
        return f"{memory} is memory"
    if not hasattr(os, "posix_fadvise"):
        return "this system cannot be asked to"
    try:
        for file in files:
            _drop(file)
        return _what_stayed(files)
    except OSError as error:
        return f"{error.strerror or error}"


def _drop(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)  # pages that are not on the disk yet would stay
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _what_stayed(files: Sequence[Path]) -> str | None:
    total, cached = map(sum, zip(*map(_pages, files), strict=True))
    share = cached / total if total else 0.0
    return None if share <= FEW else f"{100 * share:.0f} % stayed in the page cache"


def _pages(file: Path) -> tuple[int, int]:
    """The pages of a file, and how many of them are in memory. Raises OSError."""
    size, total, cached = file.stat().st_size, 0, 0
    with file.open("rb") as stream:
        for begin in range(0, size, WINDOW):
            length = min(WINDOW, size - begin)
            with mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_COPY, offset=begin) as mapped:
                found = _in_memory(mapped)
            total, cached = total + len(found), cached + found.count(IN_PAGE_CACHE)
    return total, cached


def _in_memory(mapped: mmap.mmap) -> bytes:
    """A byte for each page."""
    found = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
    first, libc = ctypes.c_char.from_buffer(mapped), ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped))
    failed = libc.mincore(address, length, found)
    del first  # else the map cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found.raw
