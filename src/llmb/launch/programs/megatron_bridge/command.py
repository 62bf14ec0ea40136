# SPDX-License-Identifier: Apache-2.0
"""Converts a recipe to a command of Megatron-Bridge's performance script, which can train on SQuAD.

For ``--data squad_packed``, the script reads ``training.jsonl`` and ``validation.jsonl`` below ``--dataset_root``, in
the format in which llmb prepares them, and packs them with a Hugging Face tokenizer (data/builders/hf_dataset.py,
finetuning_dataset.py). Before that, its first rank loads the dataset ``squad`` (``rajpurkar/squad`` after v0.4.2) with
the library ``datasets``, but uses the content only for missing files. Loading would contact the hub unless the working
folder contains a folder with this name, which ``datasets`` prefers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmb.base.errors import UsageError, itemized
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype, Layout, Recipe
from llmb.catalogue.resolve import find_model, find_workload
from llmb.catalogue.window import resolve_window
from llmb.launch.jobspec.spec import RUN_FOLDER, Word
from llmb.launch.programs.megatron_bridge.versions import Script, bridge_data, bridge_recipe, script_of, script_problems
from llmb.launch.programs.port import option_text
from llmb.readers.profiles import NSYS_FOLDER
from llmb.readers.profiles.trace_files import REPORT_END
from llmb.runs.checkpoints.origin import DataOrigin, Origin, WeightsOrigin
from llmb.runs.checkpoints.prepared_data import prepared_folders
from llmb.runs.choices import DEFAULT_SEED, Choices
from llmb.runs.plan import Plan
from llmb.runs.trace_reports import GPU_METRICS, NSYS, RECORDING, report_name

PACKED = "squad_packed"
CONTEXT = "context"
SQUAD_TRAINING, VALIDATION, TOKENIZER = "training.jsonl", "validation.jsonl", "tokenizer.json"
WORKING_FOLDER = "data"
"""Name of the first rank's working folder, in the run folder."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# The arguments are the working folder and the training samples.
ENTER_FOLDER = (
    '[ "$RANK" != 0 ] || { mkdir -p "$1/squad" "$1/rajpurkar" && ln -sfn "$2" "$1/squad/train.jsonl" &&'
    ' ln -sfn ../squad "$1/rajpurkar/squad" && cd "$1"; } || exit 1; shift 2'
)
"""Shell text that makes the dataset available in the first rank's working folder."""


@dataclass(frozen=True, slots=True)
class Squad:
    """SQuAD as llmb prepares it: the folders of the samples (``root``) and of the tokenizer."""

    root: Path
    tokenizer: Path

    @property
    def training(self) -> Path:
        return self.root / SQUAD_TRAINING

    def arguments(self) -> Iterator[tuple[str, str]]:
        """Yield the names and values of the script's arguments that select this data."""
        yield "data", PACKED
        yield "dataset_root", str(self.root)
        yield "tokenizer_type", "HuggingFaceTokenizer"
        yield "tokenizer_model", str(self.tokenizer)


def prepared_squad(catalogue: Catalogue, recipe: Recipe, install: Path) -> Squad | None:
    """Return the data prepared for a recipe below ``install``; None if the recipe uses none, or a file is missing."""
    source = find_workload(catalogue, recipe.workload).sources.get(recipe.size)
    if source is None:
        return None
    folders = prepared_folders(install, recipe.workload)
    squad = Squad(folders.dataset(source.dataset), folders.model(source.model) / CONTEXT)
    needed = (squad.training, squad.root / VALIDATION, squad.tokenizer / TOKENIZER)
    return squad if all(path.is_file() for path in needed) else None


# Choices that the script supports; all others must have their defaults.
SUPPORTED = frozenset(
    {
        "steps",
        "window",
        "seed",
        "label",
        "peak_lr",
        "warmup_steps",
        "fp8_recipe",
        "save_checkpoint",
        "checkpoint_interval",
        "checkpoint_dir",
        "profiling",
        "synthetic",
    }
)
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "seq_len": "seq_length",
}
"""The script's arguments for sizes of the layout, by the size's name in llmb."""
LIBRARY_WARMUP = 10
"""The parser's default number of warm-up steps; a run must have more steps than warm-up steps."""
TENSORBOARD = "tensorboard"
"""Name of the TensorBoard folder; the script writes traces of profiled ranks to ``torch_profile`` next to it."""

MOCK = Origin(
    weights=WeightsOrigin(kind="random"), data=DataOrigin(kind="synthetic", name="mock data of Megatron-Bridge")
)
"""The weights and data of a run without a dataset, even for fine-tuning."""


def bridge_plan(
    catalogue: Catalogue,
    recipe: Recipe,
    choices: Choices,
    image: str | None,
    origin: Origin = MOCK,
    *,
    packed: bool = False,
) -> Plan:
    """Return the plan of a run of the script; with ``packed``, the data in ``origin`` is SQuAD in packed sequences.

    Raises UsageError with everything that the script does not support.
    """
    data = bridge_data()
    steps = choices.steps_of(recipe, resumes=False)
    recorded = ("cuda", steps, 0, recipe.scale, recipe.documented_profile)
    profiling = choices.profiling.problems(*recorded)
    of_script = script_problems(catalogue, recipe, image)
    problems = [*_recipe_problems(catalogue, recipe), *of_script, *_choice_problems(choices), *profiling]
    if problems:
        other = "change these, or the layout, --release or --image"
        do = "change these, or omit --framework to use llmb's own engine" if recipe.engine_problem is None else other
        raise UsageError(f"{data.framework} does not support this run:{itemized(problems)}", do=do)
    profile = choices.profiling.settled(*recorded)
    return Plan(
        recipe=recipe if packed else recipe.model_copy(update={"packing": None}),
        device="cuda",
        steps=steps,
        window=resolve_window(choices.window, steps, 0, recipe.documented_window),
        seed=DEFAULT_SEED if choices.seed is None else choices.seed,
        fp8_recipe=data.fp8_recipe if recipe.dtype is Dtype.FP8 else None,
        save_checkpoint=choices.saves,
        checkpoint_interval=choices.checkpoint_interval,
        checkpoint_dir=choices.checkpoint_dir,
        # Only the job can check whether the container has Nsight Systems; the framework's images have it.
        profile=profile and profile.model_copy(update={"or_torch": False}),
        lora=recipe.lora,
        declared_origin=origin,
    )


def bridge_command(
    script: Script, plan: Plan, choices: Choices, save_dir: str, extra: Mapping[str, str], squad: Squad | None = None
) -> list[Word]:
    """Return the command that each process, one per GPU, runs; it binds the process to the NUMA node of its GPU.

    ``extra`` are arguments of the script by name, which replace arguments from the recipe. Without ``squad``, the
    default is mock data.
    """
    data, entry = bridge_data(), script.entry
    per_numa = data.gpus_per_numa_node[plan.recipe.gpu_type]
    bind = f'exec numactl --cpunodebind=$((LOCAL_RANK/{per_numa})) --membind=$((LOCAL_RANK/{per_numa})) "$@"'
    arguments = {**dict(_arguments(script, plan, choices, save_dir)), **dict(squad.arguments() if squad else ())}
    text = "; ".join(filter(None, (script.version_check(), nsys_prefix(plan), ENTER_FOLDER if squad else "", bind)))
    words: list[Word] = ["bash", "-c", text, "llmb-bind", *_report_folder(plan)]
    if squad:
        words += [RUN_FOLDER.model_copy(update={"after": f"/{WORKING_FOLDER}"}), str(squad.training)]
    words += ["python", script_of(data, entry)]
    for name, value in {**arguments, **extra}.items():
        words.extend((f"--{name}", value))
    words.extend(["--use_recipes"] * entry.library)
    words.extend(("--save_config_filepath", RUN_FOLDER.model_copy(update={"after": "/ConfigContainer.yaml"})))
    return [*words, *_overrides(script, plan, choices), *_profiling(plan)]


def bridge_origin(recipe: Recipe, squad: Squad | None, extra: Mapping[str, str]) -> Origin:
    """Return the origin of the script's weights and data: by default random weights, and prepared SQuAD or mock data.
    ``extra``, arguments of the script, may select others."""
    checkpoint, chosen = extra.get("pretrained_checkpoint"), extra.get("data")
    weights = WeightsOrigin(kind="checkpoint", name=checkpoint, path=checkpoint) if checkpoint else MOCK.weights
    if chosen and chosen != "mock":
        data = DataOrigin(kind="dataset", name=f"{chosen} of --framework-arg", path=extra.get("dataset_root"))
    elif squad and not chosen:
        name = f"SQuAD, packed by {bridge_data().framework} to {recipe.layout.seq_len}"
        data = DataOrigin(kind="dataset", name=name, path=str(squad.root))
    else:
        data = MOCK.data
    return Origin(weights=weights, data=data)


def trains_packed(squad: Squad | None, extra: Mapping[str, str]) -> bool:
    """Return whether the script trains on packed SQuAD, by default or because of its arguments ``extra``."""
    return extra.get("data", PACKED if squad else "mock") == PACKED


def nsys_prefix(plan: Plan) -> str:
    """Return shell text, if any, that puts nsys before profiled ranks' commands; argument 1 is the reports' folder."""
    profile = plan.profile
    if profile is None or profile.profiler != "nsys":
        return ""
    ranks = " ".join(map(str, profile.ranks))
    report = report_name(plan, "${RANK}", "${SLURM_JOB_ID}", "${SLURM_NODEID}").removesuffix(REPORT_END)
    metrics = f'$([ "$RANK" != {profile.ranks[0]} ] || echo {GPU_METRICS}) ' if profile.gpu_metrics else ""
    start = f'mkdir -p "$reports"; set -- {" ".join(RECORDING)} {metrics}--output="$reports/{report}" "$@"'
    missing = f"llmb: rank $RANK is not profiled: there is no {NSYS} in this image"
    command = f'if command -v {NSYS} >/dev/null; then {start}; else echo "{missing}"; fi'
    return f'reports=$1; shift; case " {ranks} " in *" $RANK "*) {command};; esac'


def _report_folder(plan: Plan) -> Iterator[Word]:
    if plan.profile and plan.profile.profiler == "nsys":
        yield RUN_FOLDER.model_copy(update={"after": f"/{NSYS_FOLDER}"})


def _arguments(script: Script, plan: Plan, choices: Choices, save_dir: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the script's arguments, which argument_parser.py defines."""
    data, recipe, layout, entry = bridge_data(), plan.recipe, plan.recipe.layout, script.entry
    yield "model_family_name", entry.family
    yield "model_recipe_name", entry.recipe
    yield "task", entry.task
    yield "gpu", recipe.gpu_type
    yield "compute_dtype", data.dtypes[recipe.dtype]
    yield "num_gpus", str(layout.gpus)
    yield "max_steps", str(plan.steps)
    yield from _sizes(script, layout)
    yield "data", "mock"
    if entry.library:
        yield "wandb_experiment_name", "llmb"  # part of a path; without it, the script fails
    if choices.saves:
        yield "save_dir", save_dir
        yield "save_interval", str(choices.checkpoint_interval or plan.steps)


def _sizes(script: Script, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield arguments for the global batch size, and for sizes that differ from the script's recipe (if that is
    unknown, all sizes but EP and ETP): an argument would also replace the recipe's variables and stages."""
    base = script.base.sizes if script.base else {"ep": layout.ep, "etp": layout.etp}
    for name, argument in SIZES.items():
        size, own = getattr(layout, name), base.get(name, 1 if script.base else None)
        if name == "gbs" or size != own:
            yield argument, "None" if name == "vp" and size == 1 else str(size)


def _overrides(script: Script, plan: Plan, choices: Choices) -> Iterator[str]:
    if script.base is None:
        yield from _layout_overrides(plan.recipe.layout)
    elif plan.recipe.layout.seq_len != script.base.seq:
        yield f"model.seq_length={plan.recipe.layout.seq_len}"
    if script.entry.library:
        yield from _library_overrides(plan, choices)
    if choices.seed is not None:
        yield f"rng.seed={choices.seed}"
    if choices.peak_lr is not None:
        yield f"optimizer.lr={choices.peak_lr}"
    if choices.warmup_steps is not None:
        yield f"scheduler.lr_warmup_iters={choices.warmup_steps}"


def _layout_overrides(layout: Layout) -> Iterator[str]:
    yield f"model.seq_length={layout.seq_len}"
    yield f"model.num_layers={layout.layers}"
    if layout.counts_embedding_and_loss and layout.pp > 1 and not layout.has_custom_split:
        yield "model.account_for_embedding_in_pipeline_split=true"
        yield "model.account_for_loss_in_pipeline_split=true"
    if layout.first_stage_layers is not None:
        yield f"model.num_layers_in_first_pipeline_stage={layout.first_stage_layers}"
    if layout.last_stage_layers is not None:
        yield f"model.num_layers_in_last_pipeline_stage={layout.last_stage_layers}"


def _library_overrides(plan: Plan, choices: Choices) -> Iterator[str]:
    """Yield overrides with the settings of the framework's tuned recipes that its library's recipes lack."""
    yield "checkpoint.load=null"
    if not choices.saves:
        yield "checkpoint.save=null"  # otherwise it saves the last step inside the container
    if not (plan.profile and plan.profile.profiler == "torch"):
        yield "logger.tensorboard_dir=null"
    if plan.recipe.layout.tp > 1:
        yield "model.sequence_parallel=true"
    if choices.warmup_steps is None:
        yield f"scheduler.lr_warmup_iters={min(LIBRARY_WARMUP, plan.steps - 1)}"


def _profiling(plan: Plan) -> Iterator[Word]:
    """Yield the profiling overrides that plugins of the framework's own launcher would set (perf_plugins.py)."""
    profile = plan.profile
    if profile is None:
        return
    yield f"profiling.use_{'nsys' if profile.profiler == 'nsys' else 'pytorch'}_profiler=true"
    yield f"profiling.profile_step_start={profile.first_step}"
    yield f"profiling.profile_step_end={profile.stop_step}"
    yield f"profiling.profile_ranks=[{','.join(map(str, profile.ranks))}]"
    yield "profiling.record_shapes=false"
    if profile.profiler == "torch":
        yield "profiling.record_memory_history=false"
        yield RUN_FOLDER.model_copy(update={"before": "logger.tensorboard_dir=", "after": f"/{TENSORBOARD}"})


def _recipe_problems(catalogue: Catalogue, recipe: Recipe) -> Iterator[str]:
    data = bridge_data()
    if bridge_recipe(recipe) is None:
        recipes = ", ".join(f"{item.workload} {item.size}" for item in data.recipes)
        yield f"its scripts have no {recipe.workload} {recipe.size}; they have {recipes}"
    if recipe.gpu_type not in data.gpu_types:
        yield f"it is not tuned for {recipe.gpu_type}, only for {', '.join(data.gpu_types)}"
    entry = bridge_recipe(recipe)
    if entry and entry.library and recipe.dtype is not Dtype.BF16:
        yield f"its {entry.recipe} is in its library of models, which supports only bf16"
    if recipe.dtype not in data.dtypes:
        yield f"it does not support {recipe.dtype}, only {', '.join(data.dtypes)}"
    whole = find_model(catalogue, recipe.workload, recipe.size)
    # A larger vocabulary is padded, which the script does by itself.
    if recipe.model.vocab_size < whole.vocab_size or recipe.model.moe != whole.moe:
        yield "the recipe's vocabulary or experts differ from the script's, as in llmb's proxies and early releases"
    if not recipe.layout.sequence_parallel:
        yield "--no-sequence-parallel is set; the script shards sequences whenever TP is above 1"


def _choice_problems(choices: Choices) -> Iterator[str]:
    default, scaling = Choices(), bridge_data().fp8_recipe
    yield from choices.label_problems()
    if choices.profiling.nccl_trace:
        yield "--nccl-trace is set, which llmb does not pass to the script"
    if choices.fp8_recipe not in (None, scaling):
        yield f"--fp8-recipe is {choices.fp8_recipe}; the script uses {scaling}"
    for name in Choices.model_fields:
        if name not in SUPPORTED and getattr(choices, name) != getattr(default, name):
            yield f"{option_text(choices, name)} is set, which llmb does not pass to the script"
