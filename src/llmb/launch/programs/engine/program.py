# SPDX-License-Identifier: Apache-2.0
"""llmb's engine as a program of jobs, and the check, before a run starts or is queued, that the run fits its GPUs."""

from collections.abc import Callable, Container, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from llmb.base.errors import EnvironmentProblem, RunFailed, UsageError, pip_install
from llmb.base.processes import run_talking
from llmb.base.scratch import scratch_folder
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe
from llmb.launch.jobspec.job_options import FrameworkOptions
from llmb.launch.jobspec.spec import PYTHON, RUN_FOLDER, VariableLayer
from llmb.launch.programs.engine.nsys_command import with_profiler, worker_module
from llmb.launch.programs.port import End, Program, ProgramRequest, ProgramWork, StepProgress, requested_container
from llmb.launch.site.site import Site
from llmb.prediction.memory import clearly_fits, estimate, estimate_here, settle_sharding
from llmb.prediction.prediction import LLMB, predicted_step
from llmb.prediction.search import remedies
from llmb.readers.samples.host import Device
from llmb.readers.samples.samples import samples_of_ended
from llmb.runs.checkpoint_use import report_checkpoints
from llmb.runs.checkpoints.checkpoint import RECORD, checkpoint_name
from llmb.runs.choices import Choices
from llmb.runs.conclusion import (
    RunEvidence,
    conclude,
    split_window_reason,
    why_contradicting,
    window_began,
    with_steady_window,
)
from llmb.runs.folder import RunFolder, tail
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.planning import NotPrepared, plan_training
from llmb.runs.rank_account import GIB, PROGRAM, SURE_MARGIN_GIB, AccountJob, MemoryUse, RankAccount, countable
from llmb.runs.record import ENGINE, RunRecord, engine_plan
from llmb.runs.result import NOT_SAMPLED, Result
from llmb.runs.steps import StepFollower, read_steps
from llmb.runs.trace_reports import report_profile


class EngineProgram(Program):
    """Trains with ``llmb.engine.worker``, with or without the cluster's container."""

    name = ENGINE
    runs_here = True

    def plan(
        self, catalogue: Catalogue, recipe: Recipe, choices: Choices, options: FrameworkOptions, site: Site
    ) -> EnginePlan:
        if options.arguments:
            raise UsageError("--framework-arg requires --framework", do="add --framework, or omit --framework-arg")
        return plan_engine(catalogue, recipe, choices, site.install)

    def work(self, plan: Plan, request: ProgramRequest, folder: RunFolder) -> ProgramWork:  # noqa: ARG002 (of the port)
        assert isinstance(plan, EnginePlan)
        return ProgramWork(
            command=(PYTHON, "-P", "-m", worker_module(plan), RUN_FOLDER),
            container=requested_container(request.options, request.site.config.container),
            variables=VariableLayer("engine", shipped_variables(plan.device, request.variables, count_streams(plan))),
        )

    def started(self, plan: Plan) -> Plan:
        return with_profiler(plan)

    def progress(self, folder: RunFolder, plan: Plan) -> StepProgress:
        steps = len(read_steps(folder.steps))
        return StepProgress(steps, steps >= plan.steps and has_last_checkpoint(folder, plan))

    def new_steps(self, folder: RunFolder) -> StepFollower:
        return StepFollower(folder.steps)

    def result(self, folder: RunFolder, record: RunRecord, end: End) -> Result:
        steps = read_steps(folder.steps)
        contradiction = why_contradicting(record, steps)
        record, unsteady = (record, None) if contradiction else with_steady_window(record, steps)
        plan = engine_plan(record)
        sampled = plan.resource_interval_s is not None
        return conclude(
            RunEvidence(
                plan,
                steps,
                end.exit_code,
                tail(folder.log),
                end.cause,
                checkpoint=report_checkpoints(folder, plan, steps),
                profile=report_profile(folder, plan),
                no_window=unsteady or split_window_reason(record),
                began=window_began(record),
                contradiction=contradiction,
                environment=record.environment or None,
                samples=samples_of_ended(folder.resources) if sampled else NOT_SAMPLED,
            )
        )


def has_last_checkpoint(folder: RunFolder, plan: Plan) -> bool:
    """Return True if the checkpoint after the last step exists, or no checkpoint was requested."""
    if not plan.save_checkpoint:
        return True
    last = checkpoint_name(plan.last_step + 1, plan.samples_before(plan.last_step + 1))
    return (folder.checkpoints_of(plan) / last / RECORD).is_file()


def plan_engine(catalogue: Catalogue, recipe: Recipe, choices: Choices, install: Path) -> EnginePlan:
    """Plan a run as ``plan_training`` does, choose the sharding by memory if unspecified, and predict the step time.

    Raises the errors of ``plan_training``, and UsageError for GPUs on which the engine was never tested.
    """
    gpu = catalogue.gpus.get(recipe.gpu_type)
    if gpu and gpu.vendor != "nvidia":
        raise UsageError(
            f"llmb's engine has never been tested on {gpu.name}",
            do=f"train with another program, and judge its log with 'llmb judge LOG --gpu-type {gpu.gpu_type}'",
        )

    def sharded(plan: EnginePlan) -> EnginePlan:
        settled = settle_sharding(plan, choices.parallelism)
        return settled.model_copy(update={"predicted": predicted_step(catalogue, settled, LLMB)})

    try:
        return sharded(plan_training(catalogue, recipe, choices, install))
    except NotPrepared as error:
        assert isinstance(error.plan, EnginePlan)
        error.plan = sharded(error.plan)
        raise


class ShippedVariable(NamedTuple):
    name: str
    value: str
    why: str
    device: Device | None = None
    """The device for which the variable is set; None for both."""
    also: tuple[str, ...] = ()
    """Other names of the setting; if one of them is set, this variable is not."""
    enough_streams: int = 0
    """Ranks with at most this many CUDA streams do not need the variable."""


SHIPPED = (
    ShippedVariable("PYTHONUNBUFFERED", "1", "lines appear in the log when they are written"),
    ShippedVariable(
        "GOMP_SPINCOUNT",
        "10000",
        "waiting threads spin for only about ten microseconds: with the default, a step took 50 times as long when "
        "another process used a core",
        device="cpu",
    ),
    # If either is set, glibc no longer adapts the other; 32 MiB is the maximum to which it would have adapted it.
    ShippedVariable(
        "MALLOC_TRIM_THRESHOLD_",
        str(2**40),
        "each step reuses the memory of the previous one: returning it to the kernel and fetching it again, page by "
        "page, made a bf16 step of 90 million parameters 7 % longer",
        device="cpu",
    ),
    ShippedVariable("MALLOC_MMAP_THRESHOLD_", str(2**25), "the same, for tensors of up to 32 MiB", device="cpu"),
    ShippedVariable(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "free memory stays usable: fixed segments leave gaps that no later tensor fits",
        device="cuda",
        also=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    # Megatron-Bridge sets it for published runs on every GPU type (scripts/performance/utils/executors.py).
    ShippedVariable(
        "TORCH_NCCL_HIGH_PRIORITY",
        "1",
        "a collective, for which other ranks wait, does not queue behind computation that is independent of it",
        device="cuda",
    ),
    ShippedVariable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "32",
        "streams that share one of CUDA's hardware queues, by default 8, wait for each other's kernels",
        device="cuda",
        enough_streams=8,
    ),
)


def shipped_variables(device: Device, variables: Container[str], streams: int = 1) -> dict[str, str]:
    """Return the variables to set for a rank on ``device`` with ``streams`` CUDA streams. A setting is omitted if
    ``variables`` contains another name of it."""
    return {
        item.name: item.value
        for item in SHIPPED
        if item.device in (None, device)
        and streams > item.enough_streams
        and not any(name in variables for name in item.also)
    }


def count_streams(plan: EnginePlan) -> int:
    """Return how many CUDA streams a rank uses in a step: one computes, one copies batches, others communicate.

    Each communicator has a stream, but synchronous collectives run on the computing stream. FSDP uses streams of its
    own.
    """
    layout, path = plan.recipe.layout, plan.compute_path
    groups = {(layout.tp, 1), (layout.cp, layout.tp)}  # size and distance between ranks, which identify a group
    replicas = plan.parallelism.replicas(layout)
    sharing = [(layout.dp * layout.cp, layout.tp, replicas.dense)]
    if plan.recipe.model.moe:
        groups |= {(layout.etp, 1), (layout.ep, layout.etp)}
        sharing.append((layout.edp, layout.etp * layout.ep, replicas.experts))
    if path.exchanges_updates:
        for size, distance, copies in sharing:
            groups |= {(size // copies, distance), (copies, distance * size // copies)}
    fsdp = 3 + (max(replicas) > 1) if path.shards_parameters else 0  # copy-in, gather, scatter; reduction over replicas
    lanes = 0 if layout.pp == 1 else min(layout.pp - 1, 2) if layout.vp == 1 else 4
    return 2 + sum(size > 1 for size, _ in groups) + fsdp + lanes


VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Variables for a process that only counts memory: one thread and no GPU."""


def check_memory(plan: Plan, say: Callable[[str], None], *, force: bool) -> None:
    """Check that the run fits into memory: by an estimate and, unless it clearly fits, by counting the fullest rank.

    Raises UsageError if the counted memory plus a margin exceeds a GPU's, UserInterrupt on a signal. With
    ``force``, nothing is counted."""
    if (use := estimated(plan)) is None or clearly_fits(use):
        return
    assert isinstance(plan, EnginePlan)
    text = memory_text(use)
    if force:
        say(f"warning: {text}; not counted because of --force")
        return
    say(f"{text}; counting that rank, which takes a minute or more (--force skips this)")
    try:
        exact = count_ranks(plan, [use.fullest.rank], say)
    except (EnvironmentProblem, RunFailed) as error:
        say(f"warning: memory could not be counted: {error.what}")
        return
    if exact.capacity_gib is not None and exact.fullest.peak_bytes / GIB + SURE_MARGIN_GIB > exact.capacity_gib:
        changes = [f"pass {each.options}, which needs about {each.needed_gib:.1f} GiB" for each in remedies(plan)]
        do = "; or ".join([*changes, "use more GPUs", "pass --force to start it anyway"])
        raise UsageError(f"the run does not fit: {memory_text(exact)}", do=do)
    say(memory_text(exact) if exact.fits else f"warning: {memory_text(exact)}: it may not fit")


def estimated(plan: Plan) -> MemoryUse | None:
    """Estimate the memory of all ranks, or of the rank that runs alone; None if ``estimate_here`` returns None."""
    use, rank = estimate_here(plan), plan.recipe.pretended_rank
    if use is None or rank is None:
        return use
    assert isinstance(plan, EnginePlan)
    return estimate(plan, [rank])


def count_ranks(plan: EnginePlan, ranks: Sequence[int], say: Callable[[str], None]) -> MemoryUse:
    """Count the memory of ``ranks``; raise EnvironmentProblem if torch is missing, RunFailed if counting fails,
    UserInterrupt on a signal."""
    if find_spec("torch") is None:
        raise EnvironmentProblem("counting memory requires torch, which is not installed", do=pip_install("engine"))
    counted, assumptions = countable(plan)
    accounts = []
    for number in ranks:
        say(f"counting rank {number} of {plan.recipe.layout.gpus}")
        accounts.append(count_rank(AccountJob(plan=counted, rank=number)))
    # torch's compiler decides which tensors are kept for the backward pass.
    compiler = f"torch {version('torch')} trains it; another version may keep different tensors"
    assumptions = (*assumptions, compiler)
    return MemoryUse(capacity_gib=plan.recipe.gpu_memory_gb, assumptions=assumptions, ranks=tuple(accounts))


def count_rank(job: AccountJob) -> RankAccount:
    with scratch_folder("llmb-memory-") as folder:
        path = folder / "job.json"
        path.write_text(job.model_dump_json())
        lines: list[bytes] = []
        ended = run_talking(("-P", "-m", PROGRAM, str(path)), VARIABLES, lines.append, "nothing was counted")
    if ended.code or not lines:
        raise ended.failure(f"the program that counts rank {job.rank}")
    return RankAccount.model_validate_json(lines[-1])


def memory_text(use: MemoryUse) -> str:
    """Describe the memory that the fullest rank needs, as a clause."""
    fullest = use.fullest
    about = "about " if use.method == "estimate" else ""
    return (
        f"rank {fullest.rank} needs {about}{use.needed_gib:.1f} of {use.capacity_gib:g} GiB on stage {fullest.pp_stage}"
    )


def memory_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if the plan may not fit according to the estimate, which is fast enough for many plans."""
    use = estimated(plan)
    if use is not None and not use.fits:
        yield f"{plan.recipe.title()} may not fit: {memory_text(use)}; run 'llmb memory' to count it"
