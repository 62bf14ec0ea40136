# SPDX-License-Identifier: Apache-2.0
"""A plan: a recipe and everything else that decides a run."""

from collections.abc import Iterator
from typing import Literal

from llmb.catalogue.records import Dtype, GradReduceDtype, Recipe, Record, Window
from llmb.errors import UsageError
from llmb.metrics.window import resolve_window
from llmb.runs.checkpoint import SavedCheckpoint, model_differences
from llmb.runs.documents import document_problems, with_documents
from llmb.runs.parallelism import Parallelism

Device = Literal["cpu", "cuda"]
RECOMPUTE = ("none", "selective", "full")


DEFAULT_SEED = 1234
DEFAULT_STALL_LIMIT_S = 300
"""Below the 10 minutes after which NCCL ends a process, so that the rank at fault is named first."""
DEFAULT_PARALLELISM = Parallelism()


class Start(Record):
    """The checkpoint that a run goes on from: where it lies, and how far its training had come."""

    path: str
    step: int
    consumed_samples: int
    optimizer_state: bool = True


class Plan(Record):
    """What a worker needs to know. Together with the software and the machine it decides every number of a run."""

    recipe: Recipe
    device: Device
    steps: int
    window: Window
    seed: int
    recompute: Literal["none", "selective", "full"]
    compiled: bool = False
    force_load_balancing: bool = False
    parallelism: Parallelism = DEFAULT_PARALLELISM
    save_checkpoint: bool = False
    checkpoint_interval: int | None = None
    checkpoint_dir: str | None = None
    """Absolute; the run saves in a folder of its own below. Null for the run's folder."""
    start: Start | None = None
    stall_limit_s: int = DEFAULT_STALL_LIMIT_S

    @property
    def first_step(self) -> int:
        """Steps are numbered through the whole training, over all runs that went on from each other."""
        return self.start.step if self.start else 0

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps - 1

    def samples_before(self, step: int) -> int:
        """Samples that the training consumed before ``step``; earlier runs may have had another batch size."""
        consumed = self.start.consumed_samples if self.start else 0
        return consumed + (step - self.first_step) * self.recipe.layout.gbs

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is saved after ``step``: after the last one, and in between where an interval is set."""
        if step == self.last_step:
            return self.save_checkpoint
        return self.checkpoint_interval is not None and (step + 1) % self.checkpoint_interval == 0


def make_plan(
    recipe: Recipe,
    *,
    device: Device,
    steps: int,
    window: str = "auto",
    seed: int | None = None,
    recompute: Literal["none", "selective", "full"] = "none",
    compiled: bool = False,
    force_load_balancing: bool = False,
    parallelism: Parallelism = DEFAULT_PARALLELISM,
    peak_lr: float | None = None,
    warmup_steps: int | None = None,
    grad_reduce_dtype: GradReduceDtype | None = None,
    document_tokens: int | None = None,
    save_checkpoint: bool = False,
    checkpoint_interval: int | None = None,
    checkpoint_dir: str | None = None,
    checkpoint: SavedCheckpoint | None = None,
    stall_limit_s: int = DEFAULT_STALL_LIMIT_S,
) -> Plan:
    """Checks that the engine can train ``recipe`` this way.

    A run that goes on from a checkpoint takes seed and training (optimizer, schedule, data) from there, but for what is
    given here and what an imported one does not know; but gradients are reduced as the recipe says, and in fp32 where
    the run computes in fp32.

    Sequences are packed from documents of ``document_tokens`` on average; where the recipe packs and nothing else is
    said, from documents whose attention costs what the recipe's do. The plan's recipe then holds the statistics of
    these documents. An interval between checkpoints includes the one at the end.

    Raises UsageError with all reasons why it cannot.
    """
    problems = list(_problems(recipe, steps, peak_lr, warmup_steps))
    if force_load_balancing and recipe.model.moe is None:
        problems.append(f"--force-load-balancing is for models with experts; {recipe.model.model} has none")
    if checkpoint_interval is not None and checkpoint_interval < 1:
        problems.append(f"--checkpoint-interval is {checkpoint_interval}; it must be at least 1")
    if checkpoint_dir and not (save_checkpoint or checkpoint_interval):
        problems.append(
            "--checkpoint-dir is given, but nothing is saved; add --save-checkpoint or --checkpoint-interval"
        )
    if stall_limit_s < 0:
        problems.append(f"--stall-limit is {stall_limit_s}; it must be 0 (no limit) or more")
    problems.extend(parallelism.problems(recipe.layout, compiled=compiled))
    if checkpoint:
        problems.extend(_checkpoint_problems(recipe, seed, checkpoint))
    if recipe.dtype is Dtype.FP32 and grad_reduce_dtype == "bf16":
        problems.append("--grad-reduce-dtype is bf16, but the run computes in fp32; leave it out or add --dtype bf16")
    changes = {
        "peak_lr": peak_lr,
        "warmup_steps": warmup_steps,
        "grad_reduce_dtype": reduction(recipe, grad_reduce_dtype),
        "document_tokens": document_tokens,
    }
    saved = checkpoint.record if checkpoint else None
    trained = saved.training if saved and saved.training else recipe.training
    training = trained.model_copy(update={k: v for k, v in changes.items() if v is not None})
    problems.extend(document_problems(training, recipe.layout.seq_len))
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise UsageError(f"this run cannot be planned:\n{lines}", do="see 'llmb run --help'")
    return Plan(
        recipe=with_documents(recipe, training),
        device=device,
        steps=steps,
        window=resolve_window(window, steps, saved.step if saved else 0),
        seed=next(given for given in (seed, saved and saved.seed, DEFAULT_SEED) if given is not None),
        recompute=recompute,
        compiled=compiled,
        force_load_balancing=force_load_balancing,
        parallelism=parallelism.settled(recipe.layout),
        save_checkpoint=save_checkpoint or checkpoint_interval is not None,
        checkpoint_interval=checkpoint_interval,
        checkpoint_dir=checkpoint_dir,
        start=_start(checkpoint) if checkpoint else None,
        stall_limit_s=stall_limit_s,
    )


def reduction(recipe: Recipe, given: GradReduceDtype | None) -> GradReduceDtype:
    """A question of precision as the dtype is, so that a checkpoint has no say in it."""
    return "fp32" if recipe.dtype is Dtype.FP32 else given or recipe.training.grad_reduce_dtype


def _problems(recipe: Recipe, steps: int, peak_lr: float | None, warmup_steps: int | None) -> Iterator[str]:
    if steps < 1:
        yield f"--steps is {steps}; it must be at least 1"
    if peak_lr is not None and not peak_lr > 0:
        yield f"--lr is {peak_lr}; it must be above 0"
    if warmup_steps is not None and warmup_steps < 0:
        yield f"--warmup-steps is {warmup_steps}; it must not be negative"
    if recipe.task == "lora":
        yield "the engine trains all weights; it has no LoRA adapters yet"
    if recipe.dtype is Dtype.FP8:
        yield "the engine computes in fp32 and bf16; it has no fp8 yet"


def _checkpoint_problems(recipe: Recipe, seed: int | None, checkpoint: SavedCheckpoint) -> Iterator[str]:
    record = checkpoint.record
    for difference in model_differences(recipe.model, record.model):
        yield f"the checkpoint is of another model: {difference}"
    if record.seed is not None and seed is not None and seed != record.seed:
        yield f"--seed is {seed}, but the checkpoint was trained with {record.seed}; leave --seed out"


def _start(checkpoint: SavedCheckpoint) -> Start:
    record = checkpoint.record
    return Start(
        path=str(checkpoint.path),
        step=record.step,
        consumed_samples=record.consumed_samples,
        optimizer_state=record.optimizer_state,
    )
