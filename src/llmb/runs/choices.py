# SPDX-License-Identifier: Apache-2.0
"""What a run chooses beside its recipe, and what is wrong with it. Pure."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from llmb.catalogue.records import Dtype, GradReduceDtype, Recipe, Record
from llmb.options.option import Option, limit_problems
from llmb.runs.attention import AttentionChoice, choice_problem
from llmb.runs.device import Device
from llmb.runs.parallelism import Parallelism
from llmb.runs.profiling import Profiling

Recompute = Literal["none", "selective", "full"]
Fp8Recipe = Literal["delayed", "current"]
_training = partial(Option, panel="Training")
_checkpoint = partial(Option, panel="Checkpoints")
DEFAULT_STEPS = 50
DEFAULT_SEED = 1234
DEFAULT_STALL_LIMIT_S = 300
"""Below the 10 minutes after which NCCL ends a process, so that the rank at fault is named first."""


class Choices(Record):
    """None leaves a choice to the recipe, or to the checkpoint that a run resumes from."""

    steps: Annotated[
        int | None, _training(help="Training steps. Default: 50; 1 with --load-checkpoint.", minimum=1)
    ] = None
    """None for the default, for one step where a run resumes, or for as many as profiling or tracing takes."""
    window: Annotated[str, Option(help="Steps to take statistics over: auto, last, all or A-B.")] = "auto"
    seed: Annotated[int | None, _training(help="Of initial values and data. Default: 1234.")] = None
    peak_lr: Annotated[float | None, _training(flags=("--lr",), help="Peak learning rate.", above=0)] = None
    warmup_steps: Annotated[int | None, _training(help="Warm-up of the learning rate.", minimum=0)] = None
    document_tokens: Annotated[
        int | None,
        _training(help="Pack sequences from documents of N tokens on average. Default: as the recipe; LoRA packs."),
    ] = None
    grad_reduce_dtype: Annotated[
        GradReduceDtype | None,
        _training(
            help="Precision in which gradients are accumulated over micro-batches and reduced over ranks. Default: as "
            "the recipe says."
        ),
    ] = None
    fp8_recipe: Annotated[
        Fp8Recipe | None,
        _training(
            help="Where FP8 tensors' scales come from: 'delayed' the largest values of earlier steps, 'current' the "
            "tensor itself, with the first and last layer in bf16. Default with --dtype fp8: delayed."
        ),
    ] = None
    emulate_fp8: Annotated[
        bool,
        _training(help="Cast to FP8, but multiply in bf16: for GPUs without FP8. Says nothing about FP8's speed."),
    ] = False
    recompute: Annotated[Recompute, _training(help="Activation recomputation (activation checkpointing).")] = "none"
    compiled: Annotated[
        bool | None,
        _training(
            flags=("--compile/--no-compile",),
            help="Compile the model's blocks with torch.compile. Default: on a GPU yes, but for zero-bubble schedules.",
        ),
    ] = None
    """None for what is fastest on the device."""
    keep_logits: Annotated[
        bool,
        _training(
            help="Keep a micro-batch's logits for the backward pass, which otherwise recomputes them in chunks: less"
            " computation for more memory."
        ),
    ] = False
    attention_backend: Annotated[
        AttentionChoice,
        _training(
            help="torch's attention kernel. 'auto': on a GPU the fastest at this run's shapes, timed before the first "
            "step; on a CPU flash. 'cudnn' and 'efficient' need a GPU."
        ),
    ] = "auto"
    force_load_balancing: Annotated[
        bool, _training(help="Give every expert as many tokens as any other, whatever the router says.")
    ] = False
    stall_limit_s: Annotated[
        int,
        _training(
            flags=("--stall-limit",),
            help="Seconds within which a run without progress is ended; 4 times as many before the first step, 12"
            " times while saving or writing a profile. 0: never.",
            minimum=0,
        ),
    ] = DEFAULT_STALL_LIMIT_S
    parallelism: Parallelism = Parallelism()
    save_checkpoint: Annotated[
        bool, _checkpoint(help="Save a checkpoint after the last step.", envvar="ENABLE_CHECKPOINT")
    ] = False
    checkpoint_interval: Annotated[
        int | None, _checkpoint(help="Save one every N steps as well, while training continues.", minimum=1)
    ] = None
    checkpoint_dir: Annotated[
        str | None,
        _checkpoint(
            help="Folder below which this run saves, in one of its own. Default: the run's folder.", folder=True
        ),
    ] = None
    load_checkpoint: Annotated[
        str | None,
        _checkpoint(
            help="Resume from a checkpoint, the folder above 'weights', on any number of processes.",
            folder=True,
            envvar="LOAD_CHECKPOINT_PATH",
        ),
    ] = None
    profiling: Profiling = Profiling()

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
        yield from limit_problems(self)
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
