# SPDX-License-Identifier: Apache-2.0
"""Plans and makes runs on this machine, and interleaves repeats of several recipes."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

from llmb.base.errors import EnvironmentProblem, InvalidRun, RunFailed, UsageError, UserInterrupt, see
from llmb.base.processes import Interrupted
from llmb.base.trust import STATE_FOLDER
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe, gpu_type_of
from llmb.catalogue.resolve import CPU, Request, find_workload, gpu_types_of, resolve
from llmb.jobs.conclude_ended import conclude_ended
from llmb.jobs.history import open_history, read_history
from llmb.jobs.job import Job, row_of_record
from llmb.jobs.locks import file_lock
from llmb.jobs.order import Prepared, send
from llmb.jobs.refresh import refresh_job
from llmb.jobs.store import Filter, Store
from llmb.jobs.submit import new_job, new_key, record_handle
from llmb.launch.jobspec.job_options import FrameworkOptions
from llmb.launch.jobspec.spec import JobSpec, write_spec
from llmb.launch.local import INTERRUPTED, JOB_VARIABLE, WORDS, local_command, local_variables, run_workers
from llmb.launch.local_spec import local_spec
from llmb.launch.programs.conclude import EndedRun, finish_run, read_ended_run
from llmb.launch.programs.engine.nsys_command import check_here
from llmb.launch.programs.port import End, find_program
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.launch.site.site import Machine, Site, check_machine, this_machine
from llmb.launch.started_ranks import StartedRank, started_rank
from llmb.readers.samples.host import NodeProcesses
from llmb.readers.samples.nvml import find_gpus
from llmb.readers.samples.other_work import run_text
from llmb.runs.checkpoint_use import check_space
from llmb.runs.choices import Choices
from llmb.runs.conditions import identity_of_plan
from llmb.runs.experiment import create_run_folder, experiment_name, run_parent
from llmb.runs.failure import last_lines
from llmb.runs.folder import RunFolder, link_latest, tail, writing
from llmb.runs.plan import EnginePlan, Plan, pretending
from llmb.runs.planning import NotPrepared
from llmb.runs.record import ENGINE, RunRecord, new_record, newest_checkpoint, write_record
from llmb.runs.steps import StepNews

LAST_LINES = 12
CONTAINER_VARIABLES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
"""Environment variables that are set to the image's name inside a container."""
DETECTED = "detected"
NOT_SAVED = "there is no checkpoint from which it could continue"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """A run on this machine that is planned but not started."""

    plan: EnginePlan
    unprofiled: Plan
    """The plan before the choice between nsys and PyTorch's profiler, which depends on this machine."""
    machine: Machine
    install: Path
    environ: Mapping[str, str]
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    label: str | None = None
    missing: NotPrepared | None = None
    """The preparations that are missing before the run can start, if any."""

    @property
    def program(self) -> str:
        return self.framework.framework or ENGINE

    def sample(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the command and variables of the workers, with a placeholder for the run folder."""
        name = self._experiment()
        folder = RunFolder(run_parent(self.install, self.plan, name) / "SECONDS" / name)
        spec = local_spec(self.plan, self.install, self.environ, folder, self.framework)
        return local_command(spec, folder, started_rank(self.environ)), self._variables(spec)

    def check(self) -> None:
        """Raise NotPrepared if preparations are missing, EnvironmentProblem if this machine cannot make the run."""
        if self.missing:
            raise self.missing
        if not started_rank(self.environ):  # else the ranks may be on several machines
            check_machine(self.plan, self.machine)
        check_here(self.unprofiled)
        find_program(self.program).check_here()
        saved_in = Path(self.plan.checkpoint_dir) if self.plan.checkpoint_dir else run_parent(self.install, self.plan)
        check_space(self.plan, saved_in)

    def beside(self) -> Iterator[str]:
        """Yield warnings about other work on this machine: other runs of llmb, and processes on its GPUs.

        If another launcher started the ranks, there are no warnings: its ranks could be mistaken for other work.
        """
        if started_rank(self.environ):
            return
        processes = NodeProcesses()
        processes.look()
        for run in processes.others():
            yield f"warning: another run is using this machine: {run_text(run)}; step times of both will be unreliable"
        gpus = find_gpus() if self.plan.device == "cuda" else None
        if gpus and (pids := sorted({pid for each in gpus.processes() for pid in each or ()})):
            yield f"warning: other processes are using this machine's GPUs: PID {', '.join(map(str, pids))}"

    def start(self, on_step: Callable[[StepNews], None], say: Say) -> EndedRun:
        """Make the run, write its record, and return the ended run even if it failed.

        Raise UserInterrupt after recording an interrupted run, or another LlmbError if files cannot be written.
        """
        folder = create_run_folder(self.install, self.plan, self._experiment())
        spec = local_spec(self.plan, self.install, self.environ, folder, self.framework)
        command, variables = local_command(spec, folder, started_rank(self.environ)), self._variables(spec)
        steps = find_program(spec.program).new_steps(folder)

        def on_time() -> None:
            for step in steps.new():
                on_step(step)

        with writing(folder.path):
            record, row = self._begin(spec, folder, variables, say)
            try:
                end = End(run_workers(command, variables, folder, on_time))
            except Interrupted as signal:
                end = End(INTERRUPTED, str(signal), cancelled=True)
            result = finish_run(folder, record, end)
        self._note(say, lambda store: refresh_job(store, row))
        if end.cause:
            saved = newest_checkpoint(folder, self.plan)
            again = f"add '--load-checkpoint {saved.path}' to continue" if saved else NOT_SAVED
            do = f"run 'llmb jobs log {record.id}' to see its log; {again}"
            raise UserInterrupt(f"run {record.id} was {result.reason}", do=do)
        return EndedRun(folder, record, result)

    def _begin(self, spec: JobSpec, folder: RunFolder, variables: Mapping[str, str], say: Say) -> tuple[RunRecord, Job]:
        # A missing history is rebuilt before this run exists, so that it is not added twice. Problems show below.
        with suppress(EnvironmentProblem, UsageError):
            open_history(self.install, say).close()
        handle = send(Prepared(spec, folder), {})
        started = find_scheduler(spec.scheduler).current_job({JOB_VARIABLE: handle.job_id})
        image = next(filter(None, map(os.environ.get, CONTAINER_VARIABLES)), None)
        command = local_command(spec, folder, started_rank(self.environ))
        record = new_record(self.plan, command, variables, started, label=self.label, image=image)
        record = record.model_copy(update={"program": self.program, "arguments": self.framework.arguments})
        row = new_job(Prepared(spec, folder, row_of_record(record)), new_key())
        row = replace(row, job_id=handle.job_id, state=WORDS["running"], status="running", nodes=started.nodes)
        row = replace(row, started_s=row.submitted_s)
        write_record(folder, record)
        write_spec(folder, spec)
        record_handle(folder, handle, row)
        link_latest(self.install, folder)
        self._note(say, lambda store: store.add([row]))
        return record, row

    def _note(self, say: Say, write: Callable[[Store], object]) -> None:
        try:
            with open_history(self.install, say) as store:
                write(store)
        except (EnvironmentProblem, UsageError) as error:
            say(f"the history of jobs lacks this run: {error.what}; run 'llmb jobs rebuild' to add it")

    def _experiment(self) -> str:
        return experiment_name(self.plan, self.program, self.framework.arguments)

    def _variables(self, spec: JobSpec) -> dict[str, str]:
        return local_variables(spec, self.machine.cores, self.environ)


def plan_here(
    catalogue: Catalogue,
    request: Request,
    choices: Choices,
    environ: Mapping[str, str],
    install: Path,
    pretended_rank: int | None = None,
    framework: FrameworkOptions | None = None,
) -> LocalRun:
    """Plan a run on this machine; with ``pretended_rank``, a run of that rank alone, with synthetic data.

    Raise UsageError for an invalid framework, layout or other option.
    """
    options = framework or FrameworkOptions()
    program = find_program(options.framework or ENGINE)
    if not program.runs_here:
        do = "run 'llmb submit' on a machine with Slurm, or omit --framework"
        raise UsageError(f"{program.name} runs only in a scheduler's jobs, not in runs on this machine", do=do)
    if options.framework and started_rank(environ):
        what = f"ranks that another launcher started can train only with llmb's engine, not {program.name}"
        raise UsageError(what, do="unset RANK and WORLD_SIZE so that 'llmb run' starts the ranks")
    machine = this_machine()
    recipe = recipe_for(catalogue, request, machine, started_rank(environ))
    if pretended_rank is not None:
        if options.framework:
            raise UsageError("only llmb's own engine runs single ranks", do="omit --framework, or --pretend-scale")
        recipe = pretending(recipe, pretended_rank)
        choices = choices.model_copy(update={"synthetic": True})
    missing = None
    try:
        unprofiled = program.plan(catalogue, recipe, choices, options, Site(install=install, shell=environ))
    except NotPrepared as error:
        unprofiled, missing = error.plan, error
    plan = program.started(unprofiled)
    assert isinstance(plan, EnginePlan), "it runs here"
    return LocalRun(
        plan=plan,
        unprofiled=unprofiled,
        machine=machine,
        install=install,
        environ=environ,
        framework=options,
        label=choices.label,
        missing=missing,
    )


def recipe_for(catalogue: Catalogue, request: Request, machine: Machine, started: StartedRank | None = None) -> Recipe:
    """Resolve ``request``, by default for the machine's type and number of GPUs; raise UsageError if it is invalid.

    The default scale is the number of ranks that another launcher started, or else up to two processes on a CPU, or
    else the machine's number of GPUs, which for tiny models is rounded down to 1, 2, 4 or 8.
    """
    here = next((gpu_type_of(name, catalogue.gpus.values()) for name in machine.gpu_names), None)
    gpu_type, types = request.gpu_type, gpu_types_of(find_workload(catalogue, request.workload), request.size)
    if gpu_type is None and machine.gpu_names:
        gpu_type = here or next((name for name in types if name != CPU), None)
    elif gpu_type is None and CPU in types:
        gpu_type = CPU
    scale = request.scale
    if started and scale not in (None, started.world_size):
        what = f"--scale is {scale}, but the number of started ranks is {started.world_size}"
        raise UsageError(what, do="omit --scale, or start as many ranks as --scale")
    if started:
        scale = started.world_size
    elif scale is None and gpu_type == CPU:
        scale = min(2, machine.cores)
    elif scale is None and machine.gpu_names:
        scale = len(machine.gpu_names)
        if "tiny" in str(request.size) and not request.overrides.gbs:
            scale = 1 << min(scale, 8).bit_length() - 1
    local = replace(request, gpu_type=gpu_type, scale=scale)
    origins = {"gpu_type": DETECTED if here or gpu_type == CPU else "default", "scale": DETECTED}
    notes = {name: text for name, text in origins.items() if getattr(local, name) != getattr(request, name)}
    recipe = resolve(catalogue, local, notes)
    if machine.gpu_names and recipe.gpu_type not in (CPU, here):
        note = f"this machine's {machine.gpu_names[0]} is not the catalogue's {recipe.gpu_type}: its peak is unknown"
        unknown = {"peak_tflops": None, "gpu_memory_gb": None}
        return recipe.model_copy(update={**unknown, "decisions": (*recipe.decisions, note)})
    return recipe


def raise_unless_successful(run: EndedRun) -> None:
    """Raise InvalidRun or RunFailed if the run did not succeed, with the last lines of the log if it failed."""
    log, result = run.folder.log, run.result
    if result.status == "invalid":
        raise InvalidRun(f"the run is invalid: {result.reason}", where=str(log))
    if result.status == "cancelled":
        raise RunFailed(f"the run was cancelled: {result.reason}", where=str(log))
    if result.status == "failed":
        what = "\n  | ".join((f"the run failed: {result.reason}", *last_lines(tail(log), LAST_LINES)))
        raise RunFailed(what, where=str(log), do=see("when-a-run-hangs-or-dies"))


class Turn(NamedTuple):
    """One run of a series: ``recipe`` is an index from 0, ``repeat`` a number from 1."""

    recipe: int
    repeat: int


def interleaved(repeats: Sequence[int]) -> Iterator[Turn]:
    """Yield turns in rounds of all recipes, every second round reversed (A B B A ...), so that drift, such as of the
    temperature, affects the means of all recipes equally. ``repeats`` contains each recipe's number of repeats."""
    for repeat in range(1, max(repeats, default=0) + 1):
        order = range(len(repeats)) if repeat % 2 else reversed(range(len(repeats)))
        yield from (Turn(recipe, repeat) for recipe in order if repeat <= repeats[recipe])


def remaining(turns: Iterator[Turn], finished: Mapping[int, int]) -> list[Turn]:
    """Return the turns that remain; ``finished`` maps the index of a recipe to its number of finished repeats."""
    return [turn for turn in turns if turn.repeat > finished.get(turn.recipe, 0)]


def earlier_runs(local: LocalRun, say: Say) -> list[EndedRun]:
    """Return the successful repeats of ``local`` with its label, oldest first; an empty list if it has no label.

    Runs whose client was killed after their last step are concluded first.
    """
    if local.label is None:
        return []
    with read_history(local.install, say) as store:
        jobs = store.jobs(Filter(label=local.label, runs_only=True))
    key = identity_of_plan(local.plan, local.program, local.framework.arguments).key
    folders = [job.folder for job in jobs if job.identity == key]
    conclude_ended(folders, say)
    ended = [run for folder in folders if (run := _ended(folder)) and run.result.status == "success"]
    runs = [run for run in ended if _measured(run.plan) == _measured(local.plan)]
    return list({run.record.run_id: run for run in reversed(runs)}.values())[::-1]


def runs_lock(install: Path, say: Say) -> AbstractContextManager[object]:
    """Return a lock for a series of runs, so that clients of an install root do not disturb each other's measurements.

    Clients report that they wait, and wait without limit. Raise EnvironmentProblem if the file cannot be locked.
    """
    waiting = "another command is running a series here; waiting for it to end"
    return file_lock(install / STATE_FOLDER / "runs.lock", inf, "making several runs", lambda: say(waiting))


def _ended(folder: RunFolder) -> EndedRun | None:
    try:
        return read_ended_run(folder)
    except (UsageError, EnvironmentProblem):
        return None


def _measured(plan: Plan) -> tuple[int, ...]:
    """Return the steps, seed and window, which must be equal for repeats; the identity does not include them."""
    return plan.first_step, plan.steps, plan.seed, plan.window.first, plan.window.last
