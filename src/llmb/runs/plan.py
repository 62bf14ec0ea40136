# SPDX-License-Identifier: Apache-2.0
"""A plan: a recipe and all other decisions about a run."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import FiniteFloat

from llmb.base.errors import UsageError, itemized
from llmb.catalogue.packing import SHORTEST_MEAN, fitted_mean, scaled_mean, synthetic_packing
from llmb.catalogue.records import (
    Count,
    DocumentLengths,
    Dtype,
    GradReduceDtype,
    Lora,
    Packing,
    Positive,
    Recipe,
    Record,
    Size,
    Training,
    Window,
)
from llmb.catalogue.window import resolve_window
from llmb.readers.samples.host import Device
from llmb.runs.attention_choice import AttentionChoice
from llmb.runs.checkpoints.checkpoint import CheckpointRecord, SavedCheckpoint, model_differences
from llmb.runs.checkpoints.origin import DataOrigin, Origin, WeightsOrigin, dataset_title, identity_of, synthetic_text
from llmb.runs.checkpoints.prepared_data import PackedDataset
from llmb.runs.choices import (
    DEFAULT_SEED,
    DEFAULT_STALL_LIMIT_S,
    Choices,
    Communication,
    Fp8Recipe,
    Parallelism,
    Recompute,
)
from llmb.runs.profiling import Profile


class Start(Record):
    """The checkpoint that a run resumes from, and the progress of the training that saved it."""

    path: str
    step: Count
    consumed_samples: Count
    optimizer_state: bool = True
    origin: Origin | None = None
    """Origin of the weights and data so far; None if the checkpoint does not record it."""


class InitialWeights(Record):
    """The checkpoint that contains the weights of step 0."""

    path: str
    name: str
    """Name of the imported model, such as ``meta-llama/Meta-Llama-3-70B``, or of the run that saved the checkpoint."""
    identity: str | None = None
    """Digest of the checksums of the checkpoint's files."""


class TrainingDataset(Record):
    """The packed dataset that a run trains on, and its folder."""

    path: str
    packed: PackedDataset


class TrainingInputs(Record):
    """The prepared files that a run starts from."""

    weights: InitialWeights | None = None
    dataset: TrainingDataset | None = None
    packing: Packing | None = None
    """Statistics of ``dataset`` for the model's attention, or the recipe's if the dataset is not prepared yet."""


class PredictedStep(Record):
    """The prediction for a run by its program's rates; seconds in ``breakdown_s`` sum to ``step_time_s``."""

    step_time_s: Positive
    ci95_s: tuple[FiniteFloat, FiniteFloat]
    breakdown_s: dict[str, FiniteFloat]


class Plan(Record):
    """The part of a run's plan that every program needs; ``EnginePlan`` has more."""

    recipe: Recipe
    device: Device
    steps: Size
    window: Window
    """Provisional if its rule is ``auto``: the result then has the window that the statistics cover."""
    seed: int
    fp8_recipe: Fp8Recipe | None = None
    """None for a run that does not compute in FP8."""
    save_checkpoint: bool = False
    checkpoint_interval: Size | None = None
    checkpoint_dir: str | None = None
    """An absolute path; the run saves in its own folder below it. None for the run's folder."""
    start: Start | None = None
    """The checkpoint that the run resumes from; with ``lora``, it contains only adapters."""
    weights: InitialWeights | None = None
    """Weights of step 0, even if the run resumes; None if random, unknown, or only in ``declared_origin``."""
    dataset: TrainingDataset | None = None
    """None for synthetic tokens, or if only ``declared_origin`` has the data."""
    lora: Lora | None = None
    """None for a run that trains all weights."""
    verify_checkpoint: bool = True
    """True if the checksums of ``start``, ``weights`` and ``dataset`` are verified before they are read."""
    profile: Profile | None = None
    nccl_trace: bool = False
    predicted: PredictedStep | None = None
    """None if there is no prediction, such as on a CPU."""
    documented_software: str | None = None
    """The framework of the recipe's document, such as ``Megatron-Bridge 25.09``; None if the run uses another."""
    declared_origin: Origin | None = None
    """Origin that the other fields do not determine: of another program, or of inputs that are not prepared yet."""

    @property
    def origin(self) -> Origin:
        """The origin of the run's weights and data."""
        weights = weights_origin(self.weights, self.start)
        return self.declared_origin or Origin(weights=weights, data=data_origin(self.dataset, self.recipe.training))

    @property
    def processes(self) -> int:
        """Return the number of processes: one per rank, or one for a pretended rank."""
        return self.recipe.scale if self.recipe.pretended_rank is None else 1

    @property
    def first_step(self) -> int:
        """Number of the run's first step; numbers continue across all runs of a resumed training."""
        return self.start.step if self.start else 0

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps - 1

    def samples_before(self, step: int) -> int:
        """Return the number of samples consumed before ``step``, also by the runs that this run continues."""
        consumed = self.start.consumed_samples if self.start else 0
        return consumed + (step - self.first_step) * self.recipe.layout.gbs

    def slows_down(self, step: int) -> bool:
        """Return whether recording slows down ``step``."""
        return self.nccl_trace or (self.profile is not None and self.profile.covers(step))

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint is saved after ``step``: at the end of an interval, or of a run that saves."""
        if step == self.last_step:
            return self.save_checkpoint
        return self.checkpoint_interval is not None and (step + 1) % self.checkpoint_interval == 0


def weights_origin(weights: InitialWeights | None, start: Start | None = None) -> WeightsOrigin:
    """Return the origin of ``weights``, else that in ``start`` (unknown if not recorded); random if both are None."""
    if weights:
        return WeightsOrigin(kind="checkpoint", **weights.model_dump())
    if start is None:
        return WeightsOrigin(kind="random")
    return start.origin.weights if start.origin else WeightsOrigin(kind="unknown")


def data_origin(dataset: TrainingDataset | None, training: Training) -> DataOrigin:
    if dataset is None:
        return DataOrigin(kind="synthetic", name=synthetic_text(training))
    packed = dataset.packed
    name, identity = dataset_title(packed.name, packed.seq_len), identity_of(packed.crc32)
    source = packed.source if packed.source.startswith("/") else None
    return DataOrigin(kind="dataset", name=name, path=dataset.path, identity=identity, source=source)


class ComputePath(Record):
    """The engine's code paths for a run, as saved in ``run.json``."""

    shards_parameters: bool
    """Data-parallel ranks shard parameters, gradients and optimizer state (FSDP); else they replicate parameters."""
    exchanges_updates: bool
    """Ranks that replicate parameters sum gradients and, with sharding ``optimizer``, exchange updated parameters."""
    keeps_gathered: bool
    """Parameters stay gathered for all micro-batches of a step."""
    compiled: bool
    """Blocks are compiled by torch.compile."""
    joins_products: bool
    """Layers with the same input are multiplied as one matrix; False in FP8 runs, which join FP8 layers differently."""
    gradient_sums: Literal["by the product", "after the product", "by FSDP"]
    """How gradients of micro-batches are summed: by the products themselves, in bf16; by autograd, in fp32; by FSDP."""
    overlaps_tp: bool
    """Gathers and scatters of the sequence overlap with some products of the backward pass."""
    gathers_fp8_gradients: bool = False
    """Tensor parallelism gathers gradients after their cast to FP8, not before it."""
    overlaps_dispatch: bool = False
    """The first products of a shared expert are computed while tokens are sent to experts."""
    dispatch_parts: int = 1
    """Parts of a micro-batch's tokens: each is sent to experts and back while experts process the others."""
    fuses_casts: bool
    """Kernels of activations and of gradients' rotations also cast to FP8; this needs delayed scaling and no adapters.
    """
    fuses_tp: bool = False
    """Exposed gathers and scatters of the sequence overlap with products, through torch's symmetric memory."""
    groups_experts: bool = False
    """FP8 products of experts in the forward pass are one product on GPUs of compute capability 9.0."""
    casts_attention_again: bool
    """The backward pass casts attention's output to FP8 again."""


class EnginePlan(Plan):
    """The input of a worker of the engine or torchtitan. With software and machine, it determines a run's results."""

    emulate_fp8: bool = False
    deterministic: bool = False
    recompute: Recompute
    """Required, so that it distinguishes an EnginePlan in a file from a Plan."""
    compiled: bool = False
    keep_logits: bool = False
    attention_backend: AttentionChoice = "auto"
    communication: Communication = "overlapped"
    free_sms: Count = 0
    group_experts: bool = False
    force_load_balancing: bool = False
    capacity_factor: Positive | None = None
    """Rows that each expert computes, relative to an equal share of a rank's tokens x top-k; None to drop none."""
    parallelism: Parallelism = Parallelism()
    stall_limit_s: Count = DEFAULT_STALL_LIMIT_S
    resource_interval_s: Positive | None = None
    """Seconds between the first samples of the nodes' resources; later intervals grow. None for no samples."""

    @property
    def syncs_each_pass(self) -> bool:
        """Return whether gradients are reduced after each micro-batch's backward pass, into sharded sums."""
        return self.compute_path.shards_parameters and self.parallelism.gradient_sync == "micro-batch"

    @property
    def fused_workspace_bytes(self) -> int:
        """Bytes that tensor-parallel ranks share: two bf16 outputs of a product; 0 without fused operators."""
        layout = self.recipe.layout
        shard = layout.mbs * layout.seq_len // layout.cp // layout.tp
        return 2 * 2 * shard * self.recipe.model.hidden_size if self.compute_path.fuses_tp else 0

    @property
    def compute_path(self) -> ComputePath:
        """The engine's code paths for this run."""
        layout, in_fp8, moe = self.recipe.layout, self.fp8_recipe is not None, self.recipe.model.moe
        shared, whole = self.recipe.shares_parameters, self.parallelism.keeps_parameters
        sharded, delayed = shared and not whole, self.fp8_recipe == "delayed"
        in_fp32 = self.recipe.training.grad_reduce_dtype == "fp32"
        return ComputePath(
            shards_parameters=sharded,
            exchanges_updates=shared and whole,
            keeps_gathered=not sharded or layout.pp > 1,
            compiled=self.compiled,
            joins_products=self.compiled and not sharded and not in_fp8,
            gradient_sums="by FSDP" if sharded else "after the product" if in_fp32 else "by the product",
            overlaps_tp=layout.sequence_shards > 1 and self.lora is None,
            gathers_fp8_gradients=in_fp8
            and layout.sequence_shards > 1
            and self.lora is None
            and self.communication != "plain",
            fuses_tp=layout.sequence_shards > 1 and self.lora is None and self.communication == "fused",
            overlaps_dispatch=moe is not None
            and moe.shared_ffn_hidden_size is not None
            and layout.ep > 1
            and self.communication != "plain",
            dispatch_parts=2 if layout.ep > 1 and self.communication == "halves" else 1,
            fuses_casts=delayed and self.lora is None,
            groups_experts=self.group_experts and in_fp8 and not self.emulate_fp8 and self.device == "cuda",
            casts_attention_again=delayed and layout.pp > 1,
        )


def make_plan(
    recipe: Recipe,
    choices: Choices,
    *,
    device: Device,
    checkpoint: SavedCheckpoint | None = None,
    inputs: TrainingInputs | None = None,
    trains: bool = True,
) -> EnginePlan:
    """Make a plan.

    Raise UsageError if the run cannot be planned; ``trains`` is False for predictions and other programs.
    """
    saved, ready = checkpoint.record if checkpoint else None, inputs or TrainingInputs()
    training = chosen_training(recipe, choices, saved)
    problems = list(choices.problems(recipe, device, saved.lora if saved else None, trains=trains))
    if saved:
        problems.extend(_checkpoint_problems(recipe, choices, saved))
    packs = training.document_tokens is None and (ready.packing or recipe.packing)
    problems.extend(_packing_problems(recipe, choices, training, packed=bool(packs or training.document_tokens)))
    steps, first_step = choices.steps_of(recipe, resumes=saved is not None), saved.step if saved else 0
    recorded = (device, steps, first_step, recipe.scale, recipe.documented_profile)
    problems.extend(choices.profiling.problems(*recorded))
    if problems:
        do = "use another program, or change the model" if recipe.engine_problem else "see 'llmb run --help-all'"
        raise UsageError(f"this run cannot be planned:{itemized(problems)}", do=do)
    return EnginePlan(
        recipe=with_packing(recipe, training, ready.packing) if ready.packing else with_documents(recipe, training),
        device=device,
        steps=steps,
        window=resolve_window(choices.window, steps, first_step, recipe.documented_window),
        seed=next(seed for seed in (choices.seed, saved and saved.seed, DEFAULT_SEED) if seed is not None),
        fp8_recipe=choices.fp8_recipe_of(recipe),
        emulate_fp8=choices.emulate_fp8,
        deterministic=choices.deterministic,
        recompute=choices.recompute,
        compiled=choices.compiles_on(device),
        attention_backend=choices.attention_backend,
        communication=choices.communication,
        free_sms=choices.free_sms,
        group_experts=choices.group_experts,
        keep_logits=choices.keeps_logits_of(recipe),
        force_load_balancing=choices.balances_of(recipe),
        capacity_factor=choices.capacity_factor_of(recipe),
        parallelism=choices.parallelism.settled(recipe),
        save_checkpoint=choices.saves,
        checkpoint_interval=choices.checkpoint_interval,
        checkpoint_dir=choices.checkpoint_dir,
        start=_start(checkpoint) if checkpoint else None,
        lora=chosen_lora(recipe, choices, saved),
        weights=ready.weights or (saved_base(saved) if saved else None),
        dataset=ready.dataset,
        verify_checkpoint=choices.verify_checkpoint,
        stall_limit_s=choices.stall_limit_s,
        resource_interval_s=choices.resource_interval_s if choices.resources else None,
        profile=_alone(choices.profiling.settled(*recorded), recipe.pretended_rank),
        nccl_trace=choices.profiling.nccl_trace,
    )


def _alone(profile: Profile | None, pretended_rank: int | None) -> Profile | None:
    if profile is None or pretended_rank is None:
        return profile
    return profile.model_copy(update={"ranks": (pretended_rank,)})


def _packing_problems(recipe: Recipe, choices: Choices, training: Training, *, packed: bool) -> Iterator[str]:
    yield from document_problems(training, recipe.layout.seq_len)
    if choices.attention_backend == "varlen" and not packed:
        yield "--attention-backend varlen is for sequences packed from documents; see --document-tokens"


def chosen_training(recipe: Recipe, choices: Choices, saved: CheckpointRecord | None) -> Training:
    """Return the resumed run's training if recorded, or else the recipe's, with explicit choices and ``reduction``."""
    changes = {
        "peak_lr": choices.peak_lr,
        "warmup_steps": choices.warmup_steps,
        "grad_reduce_dtype": reduction(recipe, choices.grad_reduce_dtype),
        "document_tokens": choices.document_tokens,
        "document_lengths": _document_lengths(recipe, choices),
    }
    trained = saved.training if saved and saved.training else recipe.training
    return trained.model_copy(update={name: value for name, value in changes.items() if value is not None})


def _document_lengths(recipe: Recipe, choices: Choices) -> DocumentLengths | None:
    if choices.document_tokens is not None:
        return "uniform"
    return "squad" if choices.synthetic and recipe.task != "pretrain" else None


def reduction(recipe: Recipe, chosen: GradReduceDtype | None) -> GradReduceDtype:
    """Return the dtype of gradient reductions, which is not taken from a checkpoint."""
    return "fp32" if recipe.dtype is Dtype.FP32 else chosen or recipe.training.grad_reduce_dtype


def chosen_lora(recipe: Recipe, choices: Choices, saved: CheckpointRecord | None) -> Lora | None:
    """Return the checkpoint's or else the recipe's adapters, changed by explicit choices; None to train all weights."""
    lora = (saved and saved.lora) or recipe.lora
    return lora and lora.model_copy(update=choices.lora_changes())


def _checkpoint_problems(recipe: Recipe, choices: Choices, record: CheckpointRecord) -> Iterator[str]:
    seed = choices.seed
    for difference in model_differences(recipe.model, record.model):
        yield f"the checkpoint is of another model: {difference}"
    if recipe.lora and record.lora is None:
        yield "the checkpoint contains all weights, but LoRA resumes from adapters; pass it with --weights instead"
    elif record.lora and recipe.lora is None:
        yield f"the checkpoint contains only adapters, but {recipe.workload} trains all weights"
    if record.seed is not None and seed is not None and seed != record.seed:
        yield f"--seed is {seed}, but the checkpoint was trained with {record.seed}; omit --seed"
    for name, value in choices.lora_changes().items() if record.lora else ():
        if value != getattr(record.lora, name):
            option = f"--lora-{name}"
            yield f"{option} is {value}, but the checkpoint's is {getattr(record.lora, name)}; omit {option}"


def saved_base(record: CheckpointRecord) -> InitialWeights | None:
    """Return the base weights of a checkpoint's adapters; None if they are random or unknown, or without adapters."""
    base = record.base
    if base is None or base.path is None:
        return None
    return InitialWeights(path=base.path, name=base.name or base.path, identity=base.identity)


def _start(checkpoint: SavedCheckpoint) -> Start:
    record = checkpoint.record
    return Start(
        path=str(checkpoint.path),
        step=record.step,
        consumed_samples=record.consumed_samples,
        optimizer_state=record.optimizer_state,
        origin=record.origin,
    )


def document_problems(training: Training, seq_len: int) -> Iterator[str]:
    mean = training.document_tokens
    if not mean:
        return
    if mean < SHORTEST_MEAN:
        yield f"--document-tokens is {mean}; it must be 0 or at least {SHORTEST_MEAN}: one token predicts nothing"
    elif mean > seq_len:
        yield f"documents of {mean} tokens on average are longer than a sequence, {seq_len}; lower --document-tokens"


def pretending(recipe: Recipe, rank: int) -> Recipe:
    """Return the recipe with one rank running alone, without expectations."""
    alone = recipe.model_copy(update={"pretended_rank": rank})
    reason = f"{alone.pretended_text}: published figures are for all ranks"
    return alone.model_copy(update={"expectations": (), "expectations_reason": reason})


def with_documents(recipe: Recipe, training: Training) -> Recipe:
    """Return the recipe with ``training`` and its documents, without expectations if that changes the data."""
    seq_len = recipe.layout.seq_len
    usual = _usual_mean(recipe, training)
    mean = usual if training.document_tokens is None else training.document_tokens
    if mean == 0:
        return _unpacked(recipe, training)
    if mean is None:
        return recipe.model_copy(update={"training": training})
    changes: dict[str, Any] = {
        "training": training.model_copy(update={"document_tokens": mean}),
        "packing": synthetic_packing(recipe.model, seq_len, mean, training.document_lengths),
    }
    if mean != usual:
        # Published figures hold only for the recipe's own data.
        reason = f"sequences are packed from documents of {mean} tokens on average"
        changes |= {"published_flops": None, "expectations": (), "expectations_reason": reason}
    return recipe.model_copy(update=changes)


def with_packing(recipe: Recipe, training: Training, packing: Packing) -> Recipe:
    """Return the recipe with ``training`` on a packed dataset, whose statistics are ``packing``."""
    whole = {"document_tokens": None, "document_lengths": "uniform"}
    changes = {"training": training.model_copy(update=whole), "packing": packing}
    return recipe.model_copy(update=changes)


def _unpacked(recipe: Recipe, training: Training) -> Recipe:
    changes: dict[str, Any] = {"training": training, "packing": None}
    if recipe.packing:
        changes |= {"expectations": (), "expectations_reason": "each sequence is one document; the recipe's are packed"}
    return recipe.model_copy(update=changes)


def _usual_mean(recipe: Recipe, training: Training) -> int | None:
    seq_len = recipe.layout.seq_len
    if recipe.packing:
        return fitted_mean(recipe.packing.sum_of_squares, seq_len, training.document_lengths)
    return scaled_mean(seq_len) if training.document_lengths == "squad" else None


def scale_warnings(plan: Plan, *, loads: bool | None = None) -> Iterator[str]:
    """Yield warnings if checkpoints are published only for other scales; ``loads`` is by default whether the plan has a
    ``start``.
    """
    published, scale = plan.recipe.checkpoint, plan.recipe.scale
    if published is None:
        return
    where = f"{published.source} line {published.line}"
    if plan.save_checkpoint and published.save_scales:
        least, most = published.save_scales
        if not least <= scale <= most:
            yield f"published runs that save checkpoints have {least} to {most} GPUs, not {scale} ({where})"
    resumes = plan.start is not None if loads is None else loads
    smallest = published.min_load_scale
    if resumes and smallest and scale < smallest:
        yield f"published runs that load checkpoints have {smallest} GPUs or more, not {scale} ({where})"
