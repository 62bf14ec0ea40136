# SPDX-License-Identifier: Apache-2.0
"""The choices for a run in addition to its recipe, and checks of them. Pure."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

from llmb.base.options import LABEL, Option, limit_problems
from llmb.base.secrets import has_secret
from llmb.catalogue.layout_check import rank_model
from llmb.catalogue.records import Dtype, GradReduceDtype, Layout, Lora, LoraTargets, Recipe, Record
from llmb.catalogue.window import DEFAULT_RULE
from llmb.readers.samples.host import Device
from llmb.runs.attention_choice import AttentionChoice, choice_problem
from llmb.runs.profiling import Profiling

DpSharding = Literal["full", "optimizer", "none"]
GradientSync = Literal["step", "micro-batch"]
Communication = Literal["plain", "overlapped", "fused", "halves"]
_option = partial(Option, panel="Parallelism")


class Replicas(NamedTuple):
    """Numbers of replicas of the optimizer state: for dense parameters, and for routed experts."""

    dense: int = 1
    experts: int = 1


class Parallelism(Record):
    """Parallelism options of a run in addition to its layout."""

    dp_sharding: Annotated[
        DpSharding | None,
        _option(
            help="Sharding over data-parallel ranks: 'full', parameters, gradients and optimizer state (ZeRO-3); "
            "'optimizer', all but the parameters within a step (ZeRO-1); 'none' (DDP). Default: with --dp-shard-size, "
            "full; else as published; else optimizer if it clearly fits or no ranks share parameters, else full."
        ),
    ] = None
    """The tensors that the ranks of DP x CP shard; ``settled`` replaces None with the default."""
    dp_shard_size: Annotated[
        int | None,
        _option(help="Number of ranks that shard each replica, a divisor of DP x CP. Default: all, for one replica."),
    ] = None
    """Number of ranks that shard one replica; None means all."""
    gradient_sync: Annotated[
        GradientSync,
        _option(
            help="With --dp-sharding full, when gradients are reduce-scattered: once a 'step', after unsharded"
            " accumulation; or after each 'micro-batch', so that only shards are accumulated (FSDP2's"
            " set_requires_gradient_sync): less memory, but GA times as many messages."
        ),
    ] = "step"

    @property
    def sharding_text(self) -> str:
        return f"{self.dp_sharding}{' synced' * (self.gradient_sync == 'micro-batch')}"

    @property
    def keeps_parameters(self) -> bool:
        """Return whether data-parallel ranks hold the same parameters, unsharded."""
        return self.dp_sharding in ("optimizer", "none")

    def replicas(self, layout: Layout) -> Replicas:
        """Return the numbers of replicas among the DP x CP ranks (dense) and the EDP ranks (experts)."""
        replicas = layout.dp * layout.cp
        if self.dp_sharding == "none":
            return Replicas(replicas, layout.edp)
        if self.dp_shard_size is None:
            return Replicas()
        return Replicas(replicas // self.dp_shard_size, replicas // self.dp_shard_size)

    def settled(self, recipe: Recipe) -> Self:
        """Return the options with ``dp_sharding`` set: by default the published run's, ``full``, or ``optimizer`` if no
        ranks share parameters.
        """
        shared = recipe.shares_parameters
        published = recipe.published_way("parallelism.dp_sharding") if shared and self.dp_shard_size is None else None
        return self.model_copy(
            update={"dp_sharding": self.dp_sharding or published or ("full" if shared else "optimizer")}
        )

    def problems(self, layout: Layout) -> Iterator[str]:
        """Yield reasons why ``layout`` cannot run with these options."""
        if self.dp_shard_size is not None:
            yield from _shard_size_problems(layout, self.dp_sharding or "full", self.dp_shard_size)
        yield from self.sync_problems()
        if layout.pp > 1 and layout.vp == 1 and layout.ga < layout.pp:
            need = "1F1B needs a micro-batch for every stage; pass a larger --gbs, or a smaller --mbs or --pp"
            yield f"GA {layout.ga} is below PP {layout.pp}: {need}"

    def sync_problems(self) -> Iterator[str]:
        if self.gradient_sync == "micro-batch" and self.dp_sharding != "full":
            other = f"is {self.dp_sharding}" if self.dp_sharding else "is not set"
            yield f"--gradient-sync is micro-batch, but --dp-sharding {other}; pass --dp-sharding full"


def _shard_size_problems(layout: Layout, sharding: DpSharding, size: int) -> Iterator[str]:
    valid = valid_shard_sizes(layout)
    if sharding == "none":
        yield f"--dp-shard-size is {size}, but --dp-sharding none does not shard; choose full or optimizer"
    elif size not in valid:
        ranks = f"DP x CP = {layout.dp} x {layout.cp} = {layout.dp * layout.cp}"
        rest = f", and the number of replicas must divide EDP {layout.edp}"
        experts = rest if layout.edp % (layout.dp * layout.cp) else ""
        yield f"--dp-shard-size is {size}; it must divide {ranks}{experts}; valid: {', '.join(map(str, valid))}"


def valid_shard_sizes(layout: Layout) -> list[int]:
    """Return the divisors of DP x CP for which the number of replicas also divides EDP."""
    replicas = layout.dp * layout.cp
    divisors = [size for size in range(1, replicas + 1) if replicas % size == 0]
    return [size for size in divisors if layout.edp % (replicas // size) == 0]


LARGEST_PART = 1 / 32
"""Maximum fraction of the GPU's memory for kept logits, which save 1 to 2 % of a step."""
LEAST_MEMORY_GB = 2
"""The memory (GB) assumed for a CPU, or for a GPU that is not in the catalogue."""
Recompute = Literal["none", "selective", "full"]
Fp8Recipe = Literal["delayed", "current", "current-all"]
_training = partial(Option, panel="Training")
_checkpoint = partial(Option, panel="Checkpoints")
_fine_tuning = partial(Option, panel="Fine-tuning")
DEFAULT_STEPS = 50
WINDOW_HELP = (
    "Steps for the statistics: 'reference', a range that the recipe's document states for 50 steps, else those from 70 "
    "to 90 % (35-44 of 50); 'auto', the steady state; 'last'; 'all'; or A-B."
)
DEFAULT_SEED = 1234
DEFAULT_STALL_LIMIT_S = 300
"""Less than the 10 minutes after which NCCL ends a process, so that the faulty rank is reported first."""
DEFAULT_RESOURCE_INTERVAL_S = 1.0


def logits_gb(recipe: Recipe) -> float:
    """Return the size, in 10^9 bytes, of a micro-batch's logits on a rank that has them."""
    layout, size = recipe.layout, 4 if recipe.dtype is Dtype.FP32 else 2
    return layout.mbs * layout.seq_len / layout.cp * rank_model(recipe.model, layout).vocab_size * size / 1e9


def keeps_logits(recipe: Recipe) -> bool:
    """Return whether logits are kept by default: if they are small, and the head is not frozen."""
    if recipe.lora is not None:
        return False
    return logits_gb(recipe) <= LARGEST_PART * (recipe.gpu_memory_gb or LEAST_MEMORY_GB)


def logits_text(recipe: Recipe, *, kept: bool) -> str:
    size = logits_gb(recipe)
    whole = f"{size:.1f} GB" if size >= 1 else f"{1e3 * size:.3g} MB"
    if kept:
        return f"{whole} per micro-batch, kept for the backward pass"
    if recipe.lora is not None:
        return "chunked"
    return "chunked, recomputed for the backward pass unless small" + (f" (all: {whole})" if size >= 1e-3 else "")


class Choices(Record):
    """The choices of a run. None means a default, such as the recipe's or checkpoint's value."""

    steps: Annotated[
        int | None,
        _training(basic=True, help="Steps. Default: 50, or as profiling needs; 1 with --load-checkpoint.", minimum=1),
    ] = None
    window: Annotated[str, Option(help=WINDOW_HELP)] = DEFAULT_RULE
    seed: Annotated[int | None, _training(help="Seed of weights and data. Default: 1234, or the checkpoint's.")] = None
    label: Annotated[str | None, _training(basic=True, help="Name for finding and comparing runs.", form=LABEL)] = None
    peak_lr: Annotated[
        float | None,
        _training(flags=("--lr",), help="Peak learning rate. Default: the checkpoint's, else the recipe's.", above=0),
    ] = None
    warmup_steps: Annotated[
        int | None, _training(help="Learning-rate warm-up, in steps. Default: the checkpoint's or recipe's.", minimum=0)
    ] = None
    document_tokens: Annotated[
        int | None,
        _training(
            help="Pack sequences from documents of N tokens on average; 0: each sequence is one document. Default: "
            "the checkpoint's, else the recipe's."
        ),
    ] = None
    grad_reduce_dtype: Annotated[
        GradReduceDtype | None,
        _training(
            help="Precision, fp32 or bf16, in which gradients are accumulated over micro-batches and reduced over "
            "ranks. Default: that of the recipe; fp32 with --dtype fp32."
        ),
    ] = None
    fp8_recipe: Annotated[
        Fp8Recipe | None,
        _training(
            help="Scaling of FP8 tensors: 'delayed', by the largest values of earlier steps; 'current', by each "
            "tensor's own largest value, with the first and last layer in bf16; 'current-all', with all layers in FP8. "
            "Default with --dtype fp8: that of the recipe's document, else delayed."
        ),
    ] = None
    emulate_fp8: Annotated[
        bool, _training(help="Cast to FP8, but multiply in bf16: for GPUs without FP8. This is not as fast as FP8.")
    ] = False
    deterministic: Annotated[
        bool, _training(help="Use only algorithms that repeat results bit for bit on the same machine; may be slower.")
    ] = False
    recompute: Annotated[Recompute, _training(help="Activation checkpointing: none, selective or full.")] = "none"
    compiled: Annotated[
        bool | None,
        _training(
            flags=("--compile/--no-compile",), help="Compile the model's blocks with torch.compile. Default: on GPUs."
        ),
    ] = None
    """None: compile only on a GPU."""
    keep_logits: Annotated[
        bool | None,
        _training(
            flags=("--keep-logits/--no-keep-logits",),
            help="Keep a micro-batch's logits for the backward pass, which otherwise recomputes them in chunks: less"
            " computation for more memory. Default: if they take at most 1/32 of the GPU's memory, and without"
            " adapters.",
        ),
    ] = None
    """None for the default of ``keeps_logits``."""
    attention_backend: Annotated[
        AttentionChoice,
        _training(
            help="torch's attention kernel. 'auto': on a GPU, the fastest at this run's shapes, timed before the first "
            "step; on a CPU or with --deterministic, flash, or varlen for packed sequences. 'flash3', 'flash4', "
            "'cudnn' and 'efficient' need a GPU; 'flash3' and 'flash4' also the package flash-attn-3 or flash-attn-4."
        ),
    ] = "auto"
    communication: Annotated[
        Communication,
        _option(
            help="Tensor and expert parallelism: 'overlapped' casts gradients to FP8 before gathering them, and starts"
            " the shared expert while sending tokens to experts; 'plain' does both later, with the same results."
            " 'fused', for TP within a host, also sends parts of a sequence while multiplying others, with torch's"
            " fused operators in symmetric memory; 'halves', for EP, also sends half of a micro-batch's tokens"
            " while experts process the other half, which rounds sums differently. Neither 'fused' nor 'halves'"
            " has been measured."
        ),
    ] = "overlapped"
    free_sms: Annotated[
        int,
        _option(
            help="Number of SMs that matrix products leave free for communication (experimental in torch).", minimum=0
        ),
    ] = 0
    group_experts: Annotated[
        bool,
        _training(
            help="In the forward pass, multiply the FP8 inputs of all experts in one product, not one per expert; has"
            " an effect only on GPUs of compute capability 9.0."
        ),
    ] = False
    force_load_balancing: Annotated[
        bool, _training(help="Route the same number of tokens to every expert, whatever the router chooses.")
    ] = False
    capacity_factor: Annotated[
        float | None,
        _training(
            help="Capacity of an expert, relative to its equal share of a rank's tokens x top-k. Excess tokens with "
            "the lowest scores are dropped; free rows are padded. 0: no token is dropped. Default: that of the recipe.",
            minimum=0,
        ),
    ] = None
    stall_limit_s: Annotated[
        int,
        _training(
            flags=("--stall-limit",),
            help="Seconds without progress after which a run is ended; 4x before the first step, 12x while saving or"
            " writing a profile. 0: never.",
            minimum=0,
        ),
    ] = DEFAULT_STALL_LIMIT_S
    resources: Annotated[
        bool, _training(negates=True, help="Do not record the nodes' settings, or sample their GPUs, CPU and memory.")
    ] = True
    resource_interval_s: Annotated[
        float,
        _training(
            flags=("--resource-interval",),
            help="Seconds between samples of GPUs, CPU and memory; the interval grows in long runs.",
            minimum=0.01,
        ),
    ] = DEFAULT_RESOURCE_INTERVAL_S
    parallelism: Parallelism = Parallelism()
    synthetic: Annotated[
        bool,
        _fine_tuning(
            basic=True,
            help="Train from random weights on synthetic data. Fine-tuning recipes then use document lengths like "
            "those of their dataset.",
        ),
    ] = False
    weights: Annotated[
        str | None,
        _fine_tuning(
            help="Checkpoint with the initial weights, the folder above 'weights'. Default: for a recipe that"
            " fine-tunes, the result of 'llmb prepare checkpoint', else random weights. With --load-checkpoint of"
            " adapters: their base weights, if these have moved.",
            folder=True,
        ),
    ] = None
    dataset: Annotated[
        str | None,
        _fine_tuning(
            help="Packed dataset for a recipe that fine-tunes, the folder with dataset.json. Default: the "
            "result of 'llmb prepare dataset'.",
            folder=True,
        ),
    ] = None
    save_checkpoint: Annotated[
        bool, _checkpoint(basic=True, help="Save a checkpoint after the last step.", envvar="ENABLE_CHECKPOINT")
    ] = False
    checkpoint_interval: Annotated[
        int | None, _checkpoint(help="Also save a checkpoint every N steps, while training continues.", minimum=1)
    ] = None
    checkpoint_dir: Annotated[
        str | None,
        _checkpoint(
            help="Folder below which this run saves checkpoints, in a subfolder of its own. Default: the run folder.",
            folder=True,
        ),
    ] = None
    load_checkpoint: Annotated[
        str | None,
        _checkpoint(
            basic=True,
            help="Resume from a checkpoint, the folder above 'weights', on any number of processes.",
            folder=True,
            envvar="LOAD_CHECKPOINT_PATH",
        ),
    ] = None
    verify_checkpoint: Annotated[
        bool,
        _checkpoint(negates=True, help="Do not verify checksums of the checkpoint and dataset before reading them."),
    ] = True
    profiling: Profiling = Profiling()
    lora_rank: Annotated[
        int | None, _fine_tuning(help="Rank of LoRA's adapters. Default: the checkpoint's or recipe's.", minimum=1)
    ] = None
    lora_alpha: Annotated[
        float | None,
        _fine_tuning(help="Alpha; adapters' outputs are scaled by alpha / rank. Default: as for --lora-rank.", above=0),
    ] = None
    lora_dropout: Annotated[
        float | None,
        _fine_tuning(help="Dropout probability of adapters' inputs, below 1. Default: as for --lora-rank.", minimum=0),
    ] = None
    lora_targets: Annotated[
        LoraTargets | None,
        _fine_tuning(
            help="Layers with adapters: 'qkv', query, key and value as one fused projection; 'qkv-split', the three; "
            "'qv', query and value; 'attention', the three and the output projection; 'all-linear', these four and "
            "feed-forward layers. Default: as for --lora-rank."
        ),
    ] = None

    def lora_changes(self) -> dict[str, Any]:
        """Return the choices for adapters that are not None, by their field names in ``Lora``."""
        names = ("rank", "alpha", "dropout", "targets")
        chosen = {name: getattr(self, f"lora_{name}") for name in names}
        return {name: value for name, value in chosen.items() if value is not None}

    def steps_of(self, recipe: Recipe, *, resumes: bool) -> int:
        if self.steps is not None:
            return self.steps
        recorded = None if resumes else self.profiling.steps_of(recipe.documented_profile)
        return recorded or (1 if resumes else DEFAULT_STEPS)

    def compiles_on(self, device: Device) -> bool:
        """Return whether to compile; by default on a GPU."""
        return device == "cuda" if self.compiled is None else self.compiled

    def keeps_logits_of(self, recipe: Recipe) -> bool:
        """Return whether to keep logits; by default as in ``keeps_logits``."""
        return self.keep_logits if self.keep_logits is not None else keeps_logits(recipe)

    def fp8_recipe_of(self, recipe: Recipe) -> Fp8Recipe | None:
        """Return the FP8 recipe, by default the published run's, or else delayed; None if the run does not use FP8."""
        if recipe.dtype is not Dtype.FP8:
            return None
        return self.fp8_recipe or cast("Fp8Recipe", recipe.published_way("fp8_recipe") or "delayed")

    def balances_of(self, recipe: Recipe) -> bool:
        """Return whether tokens are routed evenly: if chosen, or if a pretended rank with experts drops no tokens."""
        pretends = recipe.pretended_rank is not None and recipe.model.moe is not None
        return self.force_load_balancing or (pretends and self.capacity_factor_of(recipe) is None)

    def capacity_factor_of(self, recipe: Recipe) -> float | None:
        """Return the capacity factor; None if no token is dropped."""
        if self.force_load_balancing:
            return None
        return recipe.capacity_factor if self.capacity_factor is None else self.capacity_factor or None

    @property
    def saves(self) -> bool:
        """True if the run saves checkpoints; an interval implies a checkpoint at the end."""
        return self.save_checkpoint or self.checkpoint_interval is not None

    def problems(
        self, recipe: Recipe, device: Device, resumed: Lora | None = None, *, trains: bool = True
    ) -> Iterator[str]:
        """Yield the problems of these choices; ``trains`` is False for a prediction or another program."""
        yield from filter(None, (recipe.engine_problem if trains else recipe.prediction_problem, *limit_problems(self)))
        yield from self.label_problems()
        if problem := choice_problem(self.attention_backend, device, deterministic=self.deterministic):
            yield problem
        yield from self._routing_problems(recipe)
        if self.checkpoint_dir and not self.saves:
            yield "--checkpoint-dir is set, but nothing is saved; add --save-checkpoint or --checkpoint-interval"
        if recipe.dtype is Dtype.FP32 and self.grad_reduce_dtype == "bf16":
            yield "--grad-reduce-dtype is bf16, but the run computes in fp32; omit it, or add --dtype bf16"
        yield from self.parallelism.problems(recipe.layout)
        yield from self._fp8_problems(recipe)
        capacity = self.capacity_factor_of(recipe)
        yield from communication_problems(self.communication, recipe, device, resumed or recipe.lora, capacity)
        yield from self._lora_problems(recipe, resumed)
        yield from self._pretend_problems(recipe)

    def _routing_problems(self, recipe: Recipe) -> Iterator[str]:
        moe, factor = recipe.model.moe, self.capacity_factor
        if moe is None:
            options = {"--force-load-balancing": self.force_load_balancing, "--capacity-factor": factor is not None}
            for option in (name for name, is_set in options.items() if is_set):
                yield f"{option} is for models with experts; {recipe.model.model} has none"
        elif factor and self.force_load_balancing:
            yield "--capacity-factor has no effect on the even routing of --force-load-balancing; omit one of them"
        elif factor and factor * moe.top_k > moe.experts:
            most = f"{moe.experts / moe.top_k:g}"
            yield f"--capacity-factor is {factor:g}; the maximum is {most}, at which an expert can hold all tokens"

    def _pretend_problems(self, recipe: Recipe) -> Iterator[str]:
        if recipe.pretended_rank is None:
            return
        inputs, saved, alone = "starts from random weights and synthetic data", "learns nothing", "calls no other rank"
        refused = (
            ("--load-checkpoint", self.load_checkpoint, inputs),
            ("--weights", self.weights, inputs),
            ("--dataset", self.dataset, inputs),
            ("--save-checkpoint", self.save_checkpoint, saved),
            ("--checkpoint-interval", self.checkpoint_interval, saved),
            ("--nccl-trace", self.profiling.nccl_trace, alone),
            ("--profile-ranks", self.profiling.profile_ranks, "is the only one"),
        )
        for option, is_set, why in refused:
            if is_set:
                yield f"{option} is set, but a rank that runs alone {why}; omit it"

    def label_problems(self) -> Iterator[str]:
        if self.label is None:
            return
        if has_secret(self.label):
            yield "--label looks like a secret, but would be saved with the run; choose another label"
        elif not LABEL.is_written(self.label):
            yield f"--label is {self.label!r}; it must be {LABEL.valid}"

    def _fp8_problems(self, recipe: Recipe) -> Iterator[str]:
        if recipe.dtype is Dtype.FP8:
            if self.fp8_recipe == "current" and recipe.model.layers <= 2:
                yield (
                    "--fp8-recipe current keeps the first and the last layer in bf16, but the number of layers is "
                    f"{recipe.model.layers}; choose delayed or current-all, or pass --layers 3 or more"
                )
            return
        if self.fp8_recipe:
            yield f"--fp8-recipe is {self.fp8_recipe}, but the run computes in {recipe.dtype}; add --dtype fp8"
        if self.emulate_fp8:
            yield f"--emulate-fp8 is set, but the run computes in {recipe.dtype}; add --dtype fp8"

    def _lora_problems(self, recipe: Recipe, resumed: Lora | None) -> Iterator[str]:
        changes = self.lora_changes()
        if recipe.lora is None:
            for name in changes:
                yield f"--lora-{name} is set, but {recipe.workload} trains all weights, not adapters; omit it"
            return
        lora = (resumed or recipe.lora).model_copy(update=changes)
        if lora.dropout >= 1:
            yield f"--lora-dropout is {lora.dropout:g}; it must be below 1"
        if lora.dropout and recipe.layout.pp > 1:
            owner = "checkpoint" if resumed else "recipe"
            yield (
                "--lora-dropout is unsupported with pipeline parallelism; pass --pp 1, or omit --lora-dropout"
                if self.lora_dropout
                else f"dropout {lora.dropout:g} of the {owner}'s adapters is unsupported with pipeline parallelism; "
                "pass --pp 1"
            )
        if lora.targets == "all-linear" and recipe.model.moe:
            yield f"--lora-targets all-linear: adapters of experts are unsupported; {recipe.model.model} has experts"


def communication_problems(
    way: Communication, recipe: Recipe, device: Device, lora: Lora | None, capacity_factor: float | None
) -> Iterator[str]:
    """Yield why a run cannot communicate this way."""
    layout = recipe.layout
    fused = {
        "GPUs": device == "cuda",
        "TP above 1 with sequence parallelism": layout.sequence_shards > 1,
        "a run without adapters": lora is None,
        "all ranks, not one alone": recipe.pretended_rank is None,
    }
    halves = {
        "a model with experts and EP above 1": layout.ep > 1,
        "--capacity-factor 0": capacity_factor is None,
        "an even number of tokens per rank": layout.mbs * layout.seq_len // layout.cp // layout.tp % 2 == 0,
    }
    needs = {"fused": fused, "halves": halves}.get(way, {})
    for what in (what for what, is_met in needs.items() if not is_met):
        yield f"--communication {way} needs {what}; otherwise omit --communication"
