# SPDX-License-Identifier: Apache-2.0
"""Builds the name that equal runs share, and creates the folders of runs and of their checkpoints."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from llmb.base.errors import EnvironmentProblem
from llmb.base.trust import WORKLOADS, check_links
from llmb.catalogue.records import Dtype, Recipe
from llmb.runs.choices import Choices, Parallelism, keeps_logits
from llmb.runs.folder import RunFolder, new_numbered, writing
from llmb.runs.plan import EnginePlan, Plan

ENGINE = "engine"
RECORDED_BY = {"nsys": "_nsys", "torch": "_torchprofile"}
OVERRIDES = {"seq_len": "seq{}", "first_stage_layers": "first{}", "last_stage_layers": "last{}"}
"""Overrides of the layout that the rest of the name does not show."""
LONGEST = 60
"""Maximum length of the settings in a name, so that it fits into 255 characters."""
DIGITS = 6


def experiment_name(plan: Plan, program: str = ENGINE, arguments: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the name that log files and folders of equal runs share; ``llmb parse`` skips names of recorded runs."""
    recipe, layout = plan.recipe, plan.recipe.layout
    etp = f"_etp{layout.etp}" if layout.etp > 1 else ""
    return (
        f"{recipe.task}_{recipe.model.model}_{recipe.size}_{recipe.dtype}_gpus{layout.gpus}_tp{layout.tp}_pp{layout.pp}"
        f"_cp{layout.cp}_vp{layout.vp}_ep{layout.ep}{etp}_mbs{layout.mbs}_gbs{layout.gbs}"
        f"{_parts(plan, program, arguments)}{recorded_suffix(plan)}"
    )


def recorded_suffix(plan: Plan) -> str:
    """Return the suffix in the name of a profiled or traced run; empty for other runs."""
    if plan.profile:
        return RECORDED_BY[plan.profile.profiler]
    return "_nccltrace" if plan.nccl_trace else ""


def run_parent(install: Path, plan: Plan, name: str | None = None) -> Path:
    """Return the folder of all runs of the experiment ``name``, by default of ``plan`` with llmb's engine."""
    return install / WORKLOADS / plan.recipe.workload / "experiments" / (name or experiment_name(plan))


def _parts(plan: Plan, program: str, arguments: Mapping[str, str]) -> str:
    parts = [*_layout_parts(plan.recipe), *_program_parts(program, arguments)]
    settings = "_".join([*_data_parts(plan), *_engine_parts(plan)])
    parts.append(settings if len(settings) <= LONGEST else f"set-{_digest(settings)}")
    return "".join(f"_{part}" for part in parts if part)


def _layout_parts(recipe: Recipe) -> Iterator[str]:
    if recipe.gpu_type != "cpu":
        yield recipe.gpu_type
    layout = recipe.layout
    for name in recipe.overridden:
        if name in OVERRIDES:
            yield OVERRIDES[name].format(getattr(layout, name))
    if not layout.sequence_parallel and "sequence_parallel" in recipe.overridden:
        yield "no-sp"
    if recipe.proxy:
        yield f"proxy{layout.layers}of{recipe.full_layers}"
    if recipe.pretended_rank is not None:
        yield f"pretend-rank{recipe.pretended_rank}"


def _program_parts(program: str, arguments: Mapping[str, str]) -> Iterator[str]:
    if program != ENGINE:
        yield program
    if arguments:
        yield f"args-{_digest(repr(sorted(arguments.items())))}"


def _data_parts(plan: Plan) -> Iterator[str]:
    recipe, data = plan.recipe, plan.origin.data
    if data.kind != ("synthetic" if recipe.task == "pretrain" else "dataset"):
        yield data.kind
    if plan.lora and recipe.lora and plan.lora != recipe.lora:
        before, after = recipe.lora.model_dump(), plan.lora.model_dump()
        yield from (f"{name}{value}" for name, value in after.items() if value != before[name])
    if plan.checkpoint_interval:
        yield f"save{plan.checkpoint_interval}"


def _engine_parts(plan: Plan) -> Iterator[str]:
    if not isinstance(plan, EnginePlan):
        return
    recipe, training = plan.recipe, plan.recipe.training
    logits = keeps_logits(recipe)
    parts = {
        str(plan.fp8_recipe): plan.fp8_recipe not in (None, Choices().fp8_recipe_of(recipe)),
        "emulated": plan.emulate_fp8,
        "deterministic": plan.deterministic,
        f"recompute-{plan.recompute}": plan.recompute != "none",
        "compiled": plan.compiled and plan.device == "cpu",
        "eager": not plan.compiled and plan.device == "cuda",
        f"attention-{plan.attention_backend}": plan.attention_backend != "auto",
        f"communication-{plan.communication}": plan.communication != "overlapped",
        "grouped-experts": plan.group_experts,
        f"free-sms{plan.free_sms}": plan.free_sms,
        "logits": plan.keep_logits and not logits,
        "chunked-logits": logits and not plan.keep_logits,
        "balanced": plan.force_load_balancing,
        "dropless": plan.capacity_factor is None and recipe.capacity_factor and not plan.force_load_balancing,
        f"capacity{plan.capacity_factor or 0:g}": plan.capacity_factor not in (None, recipe.capacity_factor),
        f"reduce-{training.grad_reduce_dtype}": training.grad_reduce_dtype == "fp32" and recipe.dtype is not Dtype.FP32,
        f"documents{training.document_tokens}": training.document_tokens is not None
        and training.document_lengths == "uniform",
    }
    yield from (text for text, differs in parts.items() if differs)
    chosen, usual = plan.parallelism.settled(recipe), Parallelism().settled(recipe)
    if chosen.dp_sharding != usual.dp_sharding:
        yield f"shard-{chosen.dp_sharding}"
    if chosen.dp_shard_size:
        yield f"shards{chosen.dp_shard_size}"
    if plan.syncs_each_pass:
        yield "sync-micro-batch"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


PROBE = ".probe"
PROBE_BYTES = 4096


def create_run_folder(install: Path, plan: Plan, name: str | None = None) -> RunFolder:
    """Create the new, empty folders of a run and of its checkpoints.

    Raise UsageError or EnvironmentProblem on failure.
    """
    prefix = name or experiment_name(plan)
    return stamped_folder(run_parent(install, plan, prefix), prefix, lambda run: claim_checkpoints(run, plan))


def stamped_folder(parent: Path, name: str, claim: Callable[[RunFolder], object] = lambda _run: None) -> RunFolder:
    """Create a new folder ``<name>_<seconds>/<name>`` in ``parent``, numbered if in use.

    Raise UsageError or EnvironmentProblem on failure.
    """
    check_links(parent)

    def create(stamped: Path) -> None:
        stamped.mkdir()
        try:
            claim(RunFolder(stamped / name))
        except (FileExistsError, EnvironmentProblem):
            stamped.rmdir()
            raise

    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(new_numbered(parent, f"{name}_{int(time.time())}", create) / name)
        folder.path.mkdir()
    return folder


def claim_checkpoints(run: RunFolder, plan: Plan) -> None:
    """Create and probe the run's own checkpoint folder, if any.

    Raise FileExistsError if it exists, EnvironmentProblem if not writable.
    """
    if plan.checkpoint_dir is None:
        return
    folder = run.checkpoints_of(plan)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_save_to(folder.parent, error) from error
    try:
        folder.mkdir()
    except FileExistsError:
        raise
    except OSError as error:
        raise cannot_save_to(folder, error) from error
    try:
        probe(folder)
    except OSError as error:
        folder.rmdir()
        raise cannot_save_to(folder, error) from error


def release_checkpoints(run: RunFolder, plan: Plan) -> None:
    """Remove the checkpoint folder that was claimed for a run that does not start, if the folder is empty."""
    folder = run.checkpoints_of(plan)
    if plan.checkpoint_dir is not None and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def probe(folder: Path) -> None:
    """Write a small file to an existing folder, and remove it. Raise OSError if that fails."""
    path = folder / f"{PROBE}-{os.getpid()}"
    probe_file(path)
    path.unlink(missing_ok=True)  # a process of another node with the same id may have removed it


def probe_file(path: Path) -> None:
    """Write a small file to disk. If that fails, remove it and raise OSError."""
    try:
        with path.open("wb") as stream:
            stream.write(bytes(PROBE_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def cannot_save_to(folder: Path, error: OSError) -> EnvironmentProblem:
    advice = "set --checkpoint-dir to a writable folder, or omit it"
    reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
    what = f"checkpoints cannot be saved there: {reason}"
    return EnvironmentProblem(what, where=str(error.filename or folder), do=advice)
