# SPDX-License-Identifier: Apache-2.0
"""Converts a recipe to a plan and arguments of torchtitan, and checks that torchtitan supports both.

llmb supports torchtitan 0.2.2 (torchtitan/config/job_config.py). The next version, 0.3.0, has different arguments, and
calls ``torch.distributed.set_timeout``, which torch 2.13 lacks.
"""

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from llmb.base.errors import EnvironmentProblem, UsageError, itemized, pip_install
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.layout_check import stage_sizes
from llmb.catalogue.records import ENGINE_DTYPES, Dtype, Layout, Model, Recipe
from llmb.catalogue.resolve import CPU
from llmb.launch.programs.port import option_text
from llmb.launch.programs.torchtitan.models import NAME, RELEASE, family_name, family_of, model_problems, trained_recipe
from llmb.prediction.prediction import TORCHTITAN, predicted_step
from llmb.readers.samples.host import Device
from llmb.runs.checkpoints.origin import DataOrigin, Origin, WeightsOrigin
from llmb.runs.choices import Choices, Fp8Recipe
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.profiling import Profiling

TRIED = {RELEASE: ("2.13",)}
"""Versions of torch with which each version of torchtitan was tested."""
FP8: Fp8Recipe = "current-all"
"""The name in llmb's engine for torchtitan's tensorwise scaling."""
FP8_CONVERTER = "quantize.linear.float8"
Arguments = Mapping[str, str | None]
"""Values by the dotted name of the argument; None for a flag that is set."""

# Choices that llmb passes to torchtitan; all others must have their defaults.
SUPPORTED = frozenset(
    {
        *("steps", "window", "seed", "label", "peak_lr", "warmup_steps", "grad_reduce_dtype", "fp8_recipe"),
        *(
            "emulate_fp8",
            "force_load_balancing",
            "recompute",
            "compiled",
            "keep_logits",
            "stall_limit_s",
            "parallelism",
            "synthetic",
            "profiling",
        ),
    }
)


def package_version(name: str) -> str | None:
    """Return the version of a Python package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_versions(titan: str | None, torch: str | None) -> None:
    """Raise EnvironmentProblem if a package is missing (None), or if the two versions were not tested together."""
    do = pip_install(NAME)
    if titan is None or torch is None:
        missing = [name for name, found in ((NAME, titan), ("torch", torch)) if found is None]
        raise EnvironmentProblem(f"--framework {NAME} requires {' and '.join(missing)}, which this Python lacks", do=do)
    if titan not in TRIED:
        raise EnvironmentProblem(f"{NAME} {titan} is not supported, only {', '.join(TRIED)}", do=do)
    if torch.split("+")[0].rpartition(".")[0] not in TRIED[titan]:
        what = f"{NAME} {titan} has not been tested with torch {torch}, only with {', '.join(TRIED[titan])}"
        raise EnvironmentProblem(what, do=f"install torch {TRIED[titan][-1]}")


def titan_plan(catalogue: Catalogue, recipe: Recipe, choices: Choices) -> EnginePlan:
    """Return the plan of a run; raise UsageError with all problems of the request or, if it has none, of the plan."""
    problems = [*_recipe_problems(recipe), *model_problems(recipe.model), *_choice_problems(choices, recipe.model)]
    if not problems:
        recipe = trained_recipe(recipe, choices.parallelism.settled(recipe).dp_sharding)
        forced: dict[str, object] = {"grad_reduce_dtype": "fp32", "keep_logits": True, "resources": False}
        if recipe.capacity_factor and not choices.force_load_balancing:
            forced["capacity_factor"] = 0.0  # it drops no token
        if recipe.dtype is Dtype.FP8:
            forced["fp8_recipe"] = FP8
        if family_of(recipe.model).in_bf16:
            forced["compiled"] = False
        forced["profiling"] = _profiling(choices, recipe)
        device: Device = "cpu" if recipe.gpu_type == CPU else "cuda"
        plan = make_plan(recipe, choices.model_copy(update=forced), device=device, trains=False)
        problems = [*_sharding_problems(plan), *_layout_problems(plan), *_fp8_problems(plan)]
    if problems:
        what = f"{NAME} {RELEASE} does not support this run:{itemized(problems)}"
        other = "choose another --framework" if recipe.engine_problem else "omit --framework to use llmb's own engine"
        raise UsageError(what, do=f"change these, or {other}")
    data = DataOrigin(kind="synthetic", name=recipe.training.data)
    origin = Origin(weights=WeightsOrigin(kind="random"), data=data)
    predicted = predicted_step(catalogue, plan, TORCHTITAN)
    return plan.model_copy(update={"declared_origin": origin, "predicted": predicted})


def _profiling(choices: Choices, recipe: Recipe) -> Profiling:
    """Return options that select PyTorch's profiler up to the last step: a trace is written before the next step
    begins, and torchtitan counts that time in the next step."""
    asked, steps = choices.profiling, choices.steps_of(recipe, resumes=False)
    if not asked.profile:
        return asked
    start = 9 * steps // 10 if asked.profile_start_step is None else asked.profile_start_step
    span = {"profile_start_step": start, "profile_stop_step": steps}
    return asked.model_copy(update={"profiler": "torch", **span})


def _recipe_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.task != "pretrain":
        yield f"{recipe.workload} fine-tunes, but llmb uses torchtitan only for pre-training"
    if recipe.packing or recipe.training.document_tokens:
        yield "the recipe packs sequences from documents, but llmb passes only whole sequences to torchtitan"
    if recipe.dtype not in ENGINE_DTYPES:
        yield f"--dtype is {recipe.dtype}, which llmb does not pass to torchtitan"
    if recipe.dtype is Dtype.FP32 and family_of(recipe.model).in_bf16:
        yield f"--dtype is fp32; its {family_name(recipe.model)} holds the parameters of layers in bf16"
    if not recipe.layout.sequence_parallel:
        yield "--no-sequence-parallel is set; it shards sequences whenever TP is above 1"


def _choice_problems(choices: Choices, model: Model) -> Iterator[str]:
    default = Choices()
    if choices.compiled and family_of(model).in_bf16:
        yield f"--compile is set; it does not compile {family_name(model)}"
    if choices.grad_reduce_dtype == "bf16":
        yield "--grad-reduce-dtype is bf16; it reduces gradients in fp32"
    if choices.fp8_recipe not in (None, FP8):
        yield f"--fp8-recipe is {choices.fp8_recipe}; it scales as {FP8}"
    if choices.keep_logits is False:
        yield "--no-keep-logits is set; it keeps the logits of a micro-batch for the backward pass"
    yield from _profiling_problems(choices.profiling, choices.steps)
    if choices.stall_limit_s == 0:
        yield "--stall-limit is 0; its collectives always have a time limit"
    for name in Choices.model_fields:
        if name not in SUPPORTED and getattr(choices, name) != getattr(default, name):
            yield f"{option_text(choices, name)} is set, which llmb does not pass to torchtitan"


def _profiling_problems(asked: Profiling, steps: int | None) -> Iterator[str]:
    if asked.profiler == "nsys" or asked.profile_gpu_metrics:
        option = "--profile-gpu-metrics is set" if asked.profile_gpu_metrics else "--profiler is nsys"
        yield f"{option}; llmb profiles it with PyTorch's profiler"
    if asked.nccl_trace:
        yield "--nccl-trace is set, which llmb does not pass to torchtitan"
    if asked.profile and steps is not None and asked.profile_stop_step not in (None, steps):
        yield f"--profile-stop-step is {asked.profile_stop_step}; it must be the number of steps, {steps}"


def _sharding_problems(plan: EnginePlan) -> Iterator[str]:
    layout, recipe = plan.recipe.layout, plan.recipe
    shard, _ = sharded_ranks(plan)
    if shard % layout.cp or (layout.cp > 1 and plan.parallelism.dp_sharding == "none"):
        need = "--dp-sharding must not be none, and --dp-shard-size must be a multiple of CP"
        yield f"CP is {layout.cp}, and CP ranks always shard parameters: {need}"
    if shard == 1 and layout.dp > 1 and layout.dp < layout.gpus:
        yield "parameters are replicated (DDP), which it cannot combine with other parallelism"
    elif recipe.dtype is not Dtype.FP32 and shard == 1 and layout.tp * layout.pp > 1:
        yield "TP or PP is above 1, but parameters are not sharded across DP: it would compute in fp32"
    if plan.syncs_each_pass and layout.pp > 1:
        yield "--gradient-sync is micro-batch; its pipelines reduce gradients once a step"
    if shard > 1 and recipe.model.tied_embeddings:
        yield "the embedding is tied to the head and sharded, which fails in torch"


def _layout_problems(plan: EnginePlan) -> Iterator[str]:
    layout, recipe = plan.recipe.layout, plan.recipe
    if layout.seq_len % (layout.tp * (2 * layout.cp if layout.cp > 1 else 1)):
        factors = f"TP {layout.tp}{f' x 2 x CP {layout.cp}' if layout.cp > 1 else ''}"
        yield f"--seq-len is {layout.seq_len}; it must be a multiple of {factors}"
    if recipe.model.moe and layout.etp not in (1, layout.tp):
        yield f"ETP is {layout.etp}; it must be 1 or TP {layout.tp}"
    if recipe.model.moe and sharded_ranks(plan)[0] * layout.tp % (layout.ep * layout.etp):
        yield f"EP is {layout.ep}; it must divide the number of ranks that shard parameters"
    if layout.cp > 1 and plan.device == "cpu":
        yield f"CP is {layout.cp}; on CPUs, torch does not support it"
    family = family_of(recipe.model)
    if layout.cp > 1 and not family.has_cp:
        yield f"CP is {layout.cp}; its {family_name(recipe.model)} does not support context parallelism"
    if layout.pp > 1 and not family.has_pp:
        yield f"PP is {layout.pp}; its {family_name(recipe.model)} does not support pipeline stages"
    if layout.pp > 1 and (sizes := stage_sizes(layout)) != titan_stages(layout):
        yield f"the stages have {', '.join(map(str, sizes))} layers; it makes all but the first and the last equal"


def _fp8_problems(plan: EnginePlan) -> Iterator[str]:
    if plan.fp8_recipe and plan.recipe.model.moe:
        yield "--dtype fp8 is set for a model with experts, for which its FP8 support is a prototype"
    if plan.emulate_fp8 and plan.compiled:
        yield "--emulate-fp8 requires --no-compile"
    if plan.recipe.dtype is Dtype.FP8 and plan.device == "cpu" and not plan.emulate_fp8:
        yield "FP8 on a CPU requires --emulate-fp8"


def sharded_ranks(plan: EnginePlan) -> tuple[int, int]:
    """Return the number of ranks, across DP and CP, that shard parameters together, and the number of such groups."""
    layout = plan.recipe.layout
    if plan.parallelism.dp_sharding == "none":
        return layout.cp, layout.dp
    size = plan.parallelism.dp_shard_size or layout.dp * layout.cp
    return size, layout.dp * layout.cp // size


class StageRule(NamedTuple):
    """The number of layers per stage, and how many fewer the first and the last stage have."""

    layers: int
    first_less: int
    last_less: int


def stage_rule(layout: Layout) -> StageRule:
    sizes = stage_sizes(layout)
    layers = max(sizes)
    return StageRule(layers, layers - sizes[0], layers - sizes[-1])


def titan_stages(layout: Layout) -> list[int]:
    """Return the number of layers of each stage, as torchtitan's ``generate_llm_fqn_per_model_part`` splits them."""
    rule, stages = stage_rule(layout), layout.pp * layout.vp
    equal, more = divmod(layout.layers + rule.first_less + rule.last_less, stages)
    sizes = [equal + (number < more) for number in range(stages)]
    return [sizes[0] - rule.first_less, *sizes[1:-1], sizes[-1] - rule.last_less]


def titan_arguments(plan: EnginePlan, extra: Mapping[str, str]) -> Arguments:
    """Return torchtitan's arguments except the folder, model and flavor; ``extra`` are the user's arguments.

    Raises UsageError if the user sets an argument that llmb sets, or one that begins with ``job.`` or ``model.``.
    """
    arguments = {**_training(plan), **_parallelism(plan), **_computation(plan)}
    if clashing := [name for name in extra if name in arguments or name.startswith(("job.", "model."))]:
        do = "omit them, or use llmb's options instead; see 'llmb run --help-all'"
        raise UsageError(f"--framework-arg cannot set {', '.join(clashing)}, which llmb sets", do=do)
    return {**arguments, **dict(_own_argument(name, value) for name, value in extra.items())}


def _own_argument(name: str, value: str) -> tuple[str, str | None]:
    """Convert a user's argument; true and false become the flags ``--a.b`` and ``--a.no-b``."""
    if value == "false":
        return re.sub(r"\.([^.]*)$", r".no-\1", name), None
    return name, None if value == "true" else value


def _training(plan: EnginePlan) -> Arguments:
    layout, training = plan.recipe.layout, plan.recipe.training
    passes = layout.ga if layout.pp > 1 else 1
    return {
        "training.steps": str(plan.steps),
        "training.local_batch_size": str(layout.mbs * passes),
        "training.global_batch_size": str(layout.gbs),
        "training.seq_len": str(layout.seq_len),
        "training.max_norm": str(training.clip_grad),
        "training.mixed_precision_param": "float32" if plan.recipe.dtype is Dtype.FP32 else "bfloat16",
        "optimizer.lr": str(training.peak_lr),
        "optimizer.beta1": str(training.beta1),
        "optimizer.beta2": str(training.beta2),
        "optimizer.eps": str(training.eps),
        "optimizer.weight_decay": str(training.weight_decay),
        "lr_scheduler.warmup_steps": str(training.warmup_steps),
        "lr_scheduler.total_steps": str(training.decay_steps),
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": f"{training.min_lr / training.peak_lr:.6g}",
        "debug.seed": str(plan.seed),
        "metrics.log_freq": "1",
        "metrics.disable_color_printing": None,
        # As in llmb's engine, the limit before the first step is four times as long.
        "comm.init_timeout_seconds": str(4 * plan.stall_limit_s),
        "comm.train_timeout_seconds": str(plan.stall_limit_s),
    }


def _parallelism(plan: EnginePlan) -> Arguments:
    layout, (shard, replicas) = plan.recipe.layout, sharded_ranks(plan)
    sizes: dict[str, str | None] = {
        "parallelism.data_parallel_replicate_degree": str(replicas),
        "parallelism.data_parallel_shard_degree": str(shard // layout.cp),
        "parallelism.fsdp_reshard_after_forward": "always" if plan.parallelism.dp_sharding == "full" else "never",
        "parallelism.tensor_parallel_degree": str(layout.tp),
        "parallelism.context_parallel_degree": str(layout.cp),
        "parallelism.pipeline_parallel_degree": str(layout.pp),
    }
    if plan.recipe.model.moe:
        sizes["parallelism.expert_parallel_degree"] = str(layout.ep)
        sizes["parallelism.expert_tensor_parallel_degree"] = str(layout.etp)
    if layout.pp > 1:
        rule = stage_rule(layout)
        sizes |= {
            "parallelism.pipeline_parallel_schedule": "Interleaved1F1B" if layout.vp > 1 else "1F1B",
            "parallelism.pipeline_parallel_microbatch_size": str(layout.mbs),
            "parallelism.pipeline_parallel_layers_per_stage": str(rule.layers),
            "parallelism.pipeline_parallel_first_stage_less_layers": str(rule.first_less),
            "parallelism.pipeline_parallel_last_stage_less_layers": str(rule.last_less),
        }
    return sizes


def _computation(plan: EnginePlan) -> Arguments:
    arguments: dict[str, str | None] = {"activation_checkpoint.mode": plan.recompute}
    if plan.recompute == "selective":
        arguments["activation_checkpoint.selective_ac_option"] = "op"
    if plan.compiled:
        arguments["compile.enable"] = None
    if plan.force_load_balancing:
        arguments["debug.moe_force_load_balance"] = None
    if plan.fp8_recipe:
        arguments |= {"model.converters": FP8_CONVERTER, f"{FP8_CONVERTER}.filter_fqns": "output"}
        if plan.emulate_fp8:
            arguments[f"{FP8_CONVERTER}.emulate"] = None
        elif plan.parallelism.dp_sharding != "none" and sharded_ranks(plan)[0] > 1:
            gather = f"{FP8_CONVERTER}.enable_fsdp_float8_all_gather"
            arguments |= {gather: None, f"{FP8_CONVERTER}.precompute_float8_dynamic_scale_for_fsdp": None}
    return arguments
