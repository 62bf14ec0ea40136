# SPDX-License-Identifier: Apache-2.0
"""What a run chooses beside its recipe, and what is wrong with it. Pure."""

from collections.abc import Iterator
from typing import Literal

from llmb.catalogue.records import Dtype, GradReduceDtype, Recipe, Record
from llmb.runs.attention import AttentionChoice, choice_problem
from llmb.runs.device import Device
from llmb.runs.parallelism import Parallelism
from llmb.runs.profiling import Profiling

Recompute = Literal["none", "selective", "full"]
Fp8Recipe = Literal["delayed", "current"]
DEFAULT_STEPS = 50
DEFAULT_SEED = 1234
DEFAULT_STALL_LIMIT_S = 300
"""Below the 10 minutes after which NCCL ends a process, so that the rank at fault is named first."""


class Choices(Record):
    """Null leaves a choice to the recipe, or to the checkpoint that a run goes on from."""

    steps: int | None = None
    """Null for the default, for one step where a run goes on from a checkpoint, or for as many as recording takes."""
    window: str = "auto"
    seed: int | None = None
    peak_lr: float | None = None
    warmup_steps: int | None = None
    document_tokens: int | None = None
    """Sequences are packed from documents of so many tokens on average."""
    grad_reduce_dtype: GradReduceDtype | None = None
    fp8_recipe: Fp8Recipe | None = None
    """Where an FP8 tensor's scale comes from: the steps before, or the tensor itself. Null for the recipes' own."""
    emulate_fp8: bool = False
    recompute: Recompute = "none"
    compiled: bool | None = None
    """Null for what is quicker on the device."""
    attention_backend: AttentionChoice = "auto"
    keep_logits: bool = False
    force_load_balancing: bool = False
    parallelism: Parallelism = Parallelism()
    profiling: Profiling = Profiling()
    save_checkpoint: bool = False
    checkpoint_interval: int | None = None
    checkpoint_dir: str | None = None
    load_checkpoint: str | None = None
    stall_limit_s: int = DEFAULT_STALL_LIMIT_S

    def steps_of(self, *, goes_on: bool) -> int:
        if self.steps is not None:
            return self.steps
        recorded = None if goes_on else self.profiling.steps_of()
        return recorded or (1 if goes_on else DEFAULT_STEPS)

    def compiles_on(self, device: Device) -> bool:
        """Unless chosen, on a GPU, where it saves memory traffic; but for schedules that split the backward pass."""
        if self.compiled is not None:
            return self.compiled
        return device == "cuda" and not self.parallelism.delays_weight_gradients

    def fp8_recipe_of(self, recipe: Recipe) -> Fp8Recipe | None:
        """Null for a run that does not compute in FP8."""
        return (self.fp8_recipe or "delayed") if recipe.dtype is Dtype.FP8 else None

    @property
    def saves(self) -> bool:
        """An interval between checkpoints includes the one at the end."""
        return self.save_checkpoint or self.checkpoint_interval is not None

    def problems(self, recipe: Recipe, device: Device) -> Iterator[str]:
        """Why ``recipe`` cannot be trained with these choices on ``device``."""
        yield from self._number_problems()
        if problem := choice_problem(self.attention_backend, device):
            yield problem
        if self.force_load_balancing and recipe.model.moe is None:
            yield f"--force-load-balancing is for models with experts; {recipe.model.model} has none"
        if self.checkpoint_dir and not self.saves:
            yield "--checkpoint-dir is given, but nothing is saved; add --save-checkpoint or --checkpoint-interval"
        if recipe.dtype is Dtype.FP32 and self.grad_reduce_dtype == "bf16":
            yield "--grad-reduce-dtype is bf16, but the run computes in fp32; leave it out or add --dtype bf16"
        yield from self.parallelism.problems(recipe.layout, compiled=self.compiles_on(device))
        yield from self._fp8_problems(recipe)

    def _fp8_problems(self, recipe: Recipe) -> Iterator[str]:
        if recipe.dtype is Dtype.FP8:
            if self.parallelism.delays_weight_gradients:
                yield (
                    f"--pipeline-schedule {self.parallelism.pipeline_schedule} splits products that FP8 does as one; "
                    "choose another, or --dtype bf16"
                )
            if self.fp8_recipe == "current" and recipe.model.layers <= 2:
                yield (
                    "--fp8-recipe current leaves the first and the last layer in bf16, and with "
                    f"{recipe.model.layers} layers nothing is in FP8; choose delayed, or more --layers"
                )
            return
        if self.fp8_recipe:
            yield f"--fp8-recipe is {self.fp8_recipe}, but the run computes in {recipe.dtype}; add --dtype fp8"
        if self.emulate_fp8:
            yield f"--emulate-fp8 is given, but the run computes in {recipe.dtype}; add --dtype fp8"

    def _number_problems(self) -> Iterator[str]:
        if self.steps is not None and self.steps < 1:
            yield f"--steps is {self.steps}; it must be at least 1"
        if self.peak_lr is not None and not self.peak_lr > 0:
            yield f"--lr is {self.peak_lr}; it must be above 0"
        if self.warmup_steps is not None and self.warmup_steps < 0:
            yield f"--warmup-steps is {self.warmup_steps}; it must not be negative"
        if self.checkpoint_interval is not None and self.checkpoint_interval < 1:
            yield f"--checkpoint-interval is {self.checkpoint_interval}; it must be at least 1"
        if self.stall_limit_s < 0:
            yield f"--stall-limit is {self.stall_limit_s}; it must be 0 (no limit) or more"
