# SPDX-License-Identifier: Apache-2.0
"""A recipe as a command line of Megatron-Bridge's performance script, by the script's version, and its SQuAD.

For ``--data squad_packed`` the script reads ``training.jsonl`` and ``validation.jsonl`` of ``--dataset_root``, in the
form in which llmb prepares them, and packs them itself, with a tokenizer in Hugging Face's form
(data/builders/hf_dataset.py, finetuning_dataset.py). Before, its first rank loads the dataset ``squad`` (at v0.4.2,
later ``rajpurkar/squad``) with the library ``datasets``, whose content it then only uses for files that are missing.
That would contact the hub, unless the working folder holds a folder of this name, which ``datasets`` prefers.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import Field

from llmb.base.errors import UsageError, itemized
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Dtype, Recipe, Record
from llmb.catalogue.resolve import find_model, find_workload
from llmb.catalogue.window import resolve_window
from llmb.launch.jobspec.spec import RUN_FOLDER, Word
from llmb.readers.profiles import NSYS_FOLDER
from llmb.readers.profiles.trace_files import REPORT_END
from llmb.runs.checkpoints.origin import DataOrigin, Origin, WeightsOrigin
from llmb.runs.checkpoints.prepared_data import prepared_folders
from llmb.runs.choices import DEFAULT_SEED, Choices, Fp8Recipe
from llmb.runs.plan import Plan
from llmb.runs.trace_reports import GPU_METRICS, NSYS, RECORDING, report_name

DATA = Path(__file__).with_name("megatron_bridge.yaml")
_NEMO = re.compile(r"\bnemo[+:-](\d\d\.\d\d)(?!\d)")
"""NeMo versions in its own image names, and in those of files that the reference suite's installer makes."""


class BridgeRecipe(Record):
    """A recipe of the script, with its equivalent in the catalogue."""

    workload: str
    size: str
    family: str
    recipe: str
    task: str
    library: bool = False
    """It is in the framework's library of models, which are not tuned for a GPU, nor for another dtype than bf16."""


class BridgeVariables(Record):
    """Variables of some recipes; an empty list holds for all."""

    recipes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    dtypes: tuple[Dtype, ...] = ()
    gpu_types: tuple[str, ...] = ()
    cuts_layers: bool | None = None
    """True if layers or sequences are cut, by TP or CP."""
    variables: dict[str, str]


class BridgeVersion(Record):
    """The differences of a supported version from the first one."""

    version: str
    """The major and minor version."""
    tag: str
    """The tag at which its argument parser was read, in its repository."""
    script: str | None = None
    tasks: dict[str, str] = Field(default_factory=dict)
    """Other names of tasks."""
    sets_variables: bool = False
    """True if the script sets the variables of its recipes itself, unless they are set."""
    keeps: tuple[str, ...] = ()
    """Variables that its launcher sets nevertheless."""
    library: bool = True
    """True if overrides of the configuration apply to recipes of its library, too."""


class BridgeFile(Record):
    """``megatron_bridge.yaml``."""

    framework: str
    release: str
    versions: tuple[BridgeVersion, ...]
    oldest_nemo: str
    """The first NeMo image with a supported version."""
    package_info: str
    """The path of the version in the container."""
    images: dict[str, str]
    script: str
    library_script: str
    gpu_types: tuple[str, ...]
    recipes: tuple[BridgeRecipe, ...]
    dtypes: dict[Dtype, str]
    fp8_recipe: Fp8Recipe
    """The name in llmb's engine for the framework's FP8 scaling."""
    gpus_per_numa_node: dict[str, int]
    variables: tuple[BridgeVariables, ...]


@cache
def bridge_data() -> BridgeFile:
    return read_file(DATA, BridgeFile)


def bridge_recipe(recipe: Recipe) -> BridgeRecipe | None:
    key = (recipe.workload, recipe.size)
    return next((item for item in bridge_data().recipes if (item.workload, item.size) == key), None)


def script_of(data: BridgeFile, recipe: BridgeRecipe) -> str:
    return data.library_script if recipe.library else data.script


def version_check(data: BridgeFile, entry: BridgeRecipe, variables: Mapping[str, str]) -> str:
    """Shell text that adapts the arguments to the version in the container, or ends the job for an unsupported one."""
    read = 'case $name in MAJOR|MINOR) found="${found:+$found.}$value";; esac'
    name = "${found:-of an unknown version}"
    fitting = fitting_versions(data, entry)
    why = f"llmb: this image has {data.framework} {name}, and llmb supports {versions_text(fitting)} for {entry.recipe}"
    script = script_of(data, entry)
    cases = "".join(f"{one.version}) {_adapted(script, one, variables)};; " for one in fitting)
    return (
        f"found=; while read -r name _ value; do {read}; done <{data.package_info}; "
        f'case "$found" in {cases}*) echo "{why}" >&2; exit 2;; esac'
    )


def fitting_versions(data: BridgeFile, recipe: BridgeRecipe) -> tuple[BridgeVersion, ...]:
    return tuple(one for one in data.versions if one.library or not recipe.library)


def versions_text(versions: Sequence[BridgeVersion]) -> str:
    *most, last = (one.version for one in versions)
    return f"{', '.join(most)} and {last}"


def _adapted(script: str, version: BridgeVersion, variables: Mapping[str, str]) -> str:
    """Return shell text that renames the arguments for ``version``, and leaves to it the variables that it sets."""
    renamed = {f"--task {ours}": theirs for ours, theirs in version.tasks.items()}
    cases = f'"python {script}") word={version.script};; ' if version.script else ""
    cases += "".join(f'"{before}") word={after};; ' for before, after in renamed.items())
    adapt = (
        f'words=(); before=; for word; do own=$word; case "$before $word" in {cases}esac; words+=("$word"); '
        'before=$own; done; set -- "${words[@]}"'
    )
    pairs = [shlex.quote(f"{name}={value}") for name, value in variables.items() if name not in version.keeps]
    leave = (
        f"for pair in {' '.join(pairs)}; do name=${{pair%%=*}}; "
        'if [ "${!name-}" = "${pair#*=}" ]; then unset "$name"; fi; done'
    )
    return "; ".join([adapt] * bool(cases) + [leave] * version.sets_variables) or ":"


def check_image(image: str | None, recipe: Recipe) -> None:
    """Raise UsageError for an image whose name has no supported version; others are checked when they run.

    None is the image of the first version.
    """
    data, entry = bridge_data(), bridge_recipe(recipe)
    if image is None:
        if entry and entry.library:
            versions = versions_text(fitting_versions(data, entry))
            what = f"{entry.recipe} needs {data.framework} {versions}, but the default image has {data.release}"
            raise UsageError(what, do="choose an image that has one of them with --image")
        return
    match = _NEMO.search(image)
    if match and match.group(1) < data.oldest_nemo:
        what = f"image {image}: NeMo {match.group(1)} has no version of {data.framework} that llmb supports"
        raise UsageError(what, do=f"choose an image of NeMo {data.oldest_nemo} or later, or omit --image")


PACKED = "squad_packed"
CONTEXT = "context"
SQUAD_TRAINING, VALIDATION, TOKENIZER = "training.jsonl", "validation.jsonl", "tokenizer.json"
WORKING_FOLDER = "data"
"""The folder in the run folder."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# The arguments are the working folder and the training samples.
ENTER_FOLDER = (
    '[ "$RANK" != 0 ] || { mkdir -p "$1/squad" "$1/rajpurkar" && ln -sfn "$2" "$1/squad/train.jsonl" &&'
    ' ln -sfn ../squad "$1/rajpurkar/squad" && cd "$1"; } || exit 1; shift 2'
)
"""Shell text by which the first rank finds the dataset in its working folder."""


@dataclass(frozen=True, slots=True)
class Squad:
    """``root`` contains the samples, ``tokenizer`` is a folder."""

    root: Path
    tokenizer: Path

    @property
    def training(self) -> Path:
        return self.root / SQUAD_TRAINING

    def arguments(self) -> Iterator[tuple[str, str]]:
        """Yield the names and values of the script's arguments."""
        yield "data", PACKED
        yield "dataset_root", str(self.root)
        yield "tokenizer_type", "HuggingFaceTokenizer"
        yield "tokenizer_model", str(self.tokenizer)


def prepared_squad(catalogue: Catalogue, recipe: Recipe, install: Path) -> Squad | None:
    """Return the data prepared for the recipe below ``install``; None if a file that the script needs is missing."""
    source = find_workload(catalogue, recipe.workload).sources.get(recipe.size)
    if source is None:
        return None
    folders = prepared_folders(install, recipe.workload)
    squad = Squad(folders.dataset(source.dataset), folders.model(source.model) / CONTEXT)
    needed = (squad.training, squad.root / VALIDATION, squad.tokenizer / TOKENIZER)
    return squad if all(path.is_file() for path in needed) else None


# Choices that the script supports; any other has to be left at its default.
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
LIBRARY_WARMUP = 10
"""The parser's default number of warm-up steps; a run needs more."""
TENSORBOARD = "tensorboard"
"""The TensorBoard folder, next to which the script writes one trace per rank to ``torch_profile``."""

MOCK = Origin(
    weights=WeightsOrigin(kind="random"), data=DataOrigin(kind="synthetic", name="mock data of Megatron-Bridge")
)
"""The input of the script without a dataset, even for fine-tuning."""


def bridge_plan(
    catalogue: Catalogue, recipe: Recipe, choices: Choices, origin: Origin = MOCK, *, packed: bool = False
) -> Plan:
    """Return the script's plan, with weights and data of ``origin``; ``packed`` if that is SQuAD in packed sequences.

    Raises UsageError with all that it cannot.
    """
    data = bridge_data()
    steps = choices.steps_of(recipe, resumes=False)
    recorded = ("cuda", steps, 0, recipe.scale, recipe.documented_profile)
    profiling = choices.profiling.problems(*recorded)
    problems = [*_recipe_problems(catalogue, recipe), *_choice_problems(choices), *profiling]
    if problems:
        what = f"{data.framework} {data.release} cannot run this:{itemized(problems)}"
        raise UsageError(what, do="omit --framework: the engine is llmb's own")
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
        # Whether the container has Nsight Systems is only known inside; an image of the framework has it.
        profile=profile and profile.model_copy(update={"or_torch": False}),
        lora=recipe.lora,
        declared_origin=origin,
    )


def bridge_command(
    plan: Plan, choices: Choices, save_dir: str, extra: Mapping[str, str], squad: Squad | None = None
) -> list[Word]:
    """Return the interpreter, script and arguments of one process per GPU, bound to the memory next to its GPU.

    ``extra`` are arguments of the script by name; they replace those that follow from the recipe. Without ``squad``
    the script gets its mock data.
    """
    data, recipe, entry = bridge_data(), plan.recipe, bridge_recipe(plan.recipe)
    assert entry is not None, "bridge_plan rejects other recipes"
    per_numa = data.gpus_per_numa_node[recipe.gpu_type]
    bind = f'exec numactl --cpunodebind=$((LOCAL_RANK/{per_numa})) --membind=$((LOCAL_RANK/{per_numa})) "$@"'
    arguments = {**dict(_arguments(plan, choices, save_dir)), **dict(squad.arguments() if squad else ())}
    checked = version_check(data, entry, bridge_variables(recipe))
    text = "; ".join(filter(None, (checked, nsys_prefix(plan), ENTER_FOLDER if squad else "", bind)))
    words: list[Word] = ["bash", "-c", text, "llmb-bind", *_report_folder(plan)]
    if squad:
        words += [RUN_FOLDER.model_copy(update={"after": f"/{WORKING_FOLDER}"}), str(squad.training)]
    words += ["python", script_of(data, entry)]
    for name, value in {**arguments, **extra}.items():
        words.extend((f"--{name}", value))
    words.extend(["--use_recipes"] * entry.library)
    words.extend(("--save_config_filepath", RUN_FOLDER.model_copy(update={"after": "/ConfigContainer.yaml"})))
    return [*words, *_overrides(plan, choices), *_profiling(plan)]


def bridge_origin(recipe: Recipe, squad: Squad | None, extra: Mapping[str, str]) -> Origin:
    """Return the script's input: the one chosen by its arguments ``extra``, or else SQuAD if it is prepared."""
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
    """Return whether the script packs SQuAD, by default or as its arguments ``extra`` say."""
    return extra.get("data", PACKED if squad else "mock") == PACKED


def nsys_prefix(plan: Plan) -> str:
    """Shell text that puts Nsight Systems before the command of a profiled rank; the first argument is its folder."""
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


def bridge_variables(recipe: Recipe) -> dict[str, str]:
    """Return the variables that the framework's own launcher sets for this recipe."""
    variables, entries = dict[str, str](), bridge_recipe(recipe)
    cuts = recipe.layout.tp > 1 or recipe.layout.cp > 1
    for entry in bridge_data().variables:
        pairs = (
            (entry.recipes, entries.recipe if entries else ""),
            (entry.tasks, entries.task if entries else ""),
            (entry.dtypes, recipe.dtype),
            (entry.gpu_types, recipe.gpu_type),
        )
        if all(not allowed or value in allowed for allowed, value in pairs) and entry.cuts_layers in (None, cuts):
            variables.update(entry.variables)
    return variables


def _arguments(plan: Plan, choices: Choices, save_dir: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of arguments, as argument_parser.py defines them."""
    data, recipe, layout = bridge_data(), plan.recipe, plan.recipe.layout
    entry = bridge_recipe(recipe)
    assert entry is not None, "bridge_plan rejects other recipes"
    yield "model_family_name", entry.family
    yield "model_recipe_name", entry.recipe
    yield "task", entry.task
    yield "gpu", recipe.gpu_type
    yield "compute_dtype", data.dtypes[recipe.dtype]
    yield "num_gpus", str(layout.gpus)
    yield "max_steps", str(plan.steps)
    yield "tensor_model_parallel_size", str(layout.tp)
    yield "pipeline_model_parallel_size", str(layout.pp)
    yield "virtual_pipeline_model_parallel_size", str(layout.vp) if layout.vp > 1 else "None"
    yield "context_parallel_size", str(layout.cp)
    yield "micro_batch_size", str(layout.mbs)
    yield "global_batch_size", str(layout.gbs)
    yield "seq_length", str(layout.seq_len)
    yield "data", "mock"
    if entry.library:
        yield "wandb_experiment_name", "llmb"  # part of a path, without which the script fails
    if choices.saves:
        yield "save_dir", save_dir
        yield "save_interval", str(choices.checkpoint_interval or plan.steps)


def _overrides(plan: Plan, choices: Choices) -> Iterator[str]:
    """Yield overrides of the framework's configuration that its script has no argument for."""
    layout, entry = plan.recipe.layout, bridge_recipe(plan.recipe)
    yield f"model.seq_length={layout.seq_len}"
    yield f"model.num_layers={layout.layers}"
    if entry and entry.library:
        yield from _library_overrides(plan, choices)
    if layout.counts_embedding_and_loss and layout.pp > 1 and not layout.has_custom_split:
        yield "model.account_for_embedding_in_pipeline_split=true"
        yield "model.account_for_loss_in_pipeline_split=true"
    if layout.first_stage_layers is not None:
        yield f"model.num_layers_in_first_pipeline_stage={layout.first_stage_layers}"
    if layout.last_stage_layers is not None:
        yield f"model.num_layers_in_last_pipeline_stage={layout.last_stage_layers}"
    if choices.seed is not None:
        yield f"rng.seed={choices.seed}"
    if choices.peak_lr is not None:
        yield f"optimizer.lr={choices.peak_lr}"
    if choices.warmup_steps is not None:
        yield f"scheduler.lr_warmup_iters={choices.warmup_steps}"


def _library_overrides(plan: Plan, choices: Choices) -> Iterator[str]:
    """Yield the settings of the framework's tuned recipes that those of its library lack."""
    yield "checkpoint.load=null"
    if not choices.saves:
        yield "checkpoint.save=null"  # else it saves its last step, in the container
    if not (plan.profile and plan.profile.profiler == "torch"):
        yield "logger.tensorboard_dir=null"
    if plan.recipe.layout.tp > 1:
        yield "model.sequence_parallel=true"
    if choices.warmup_steps is None:
        yield f"scheduler.lr_warmup_iters={min(LIBRARY_WARMUP, plan.steps - 1)}"


def _profiling(plan: Plan) -> Iterator[Word]:
    """Yield the overrides by the plugins of the framework's own launcher (perf_plugins.py), which do not run here."""
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
        yield f"it is not tuned for {recipe.gpu_type}; it is for {', '.join(data.gpu_types)}"
    entry = bridge_recipe(recipe)
    if entry and entry.library and recipe.dtype is not Dtype.BF16:
        yield f"its {entry.recipe} is of its library of models, which computes in bf16"
    if recipe.dtype not in data.dtypes:
        yield f"it does not compute in {recipe.dtype}; it does in {', '.join(data.dtypes)}"
    whole = find_model(catalogue, recipe.workload, recipe.size)
    # A larger one is padded, which the script does by itself.
    if recipe.model.vocab_size < whole.vocab_size or recipe.model.moe != whole.moe:
        yield "its vocabulary or experts differ from the script's: a proxy of llmb's own, or an early release's model"
    if not recipe.layout.sequence_parallel:
        yield "--no-sequence-parallel: the script cuts sequences wherever TP is above 1"


def _choice_problems(choices: Choices) -> Iterator[str]:
    default, scaling = Choices(), bridge_data().fp8_recipe
    yield from choices.label_problems()
    if choices.profiling.nccl_trace:
        yield "--nccl-trace is set, which only llmb's engine supports"
    if choices.fp8_recipe not in (None, scaling):
        yield f"--fp8-recipe is {choices.fp8_recipe}; the script uses {scaling}"
    for name in Choices.model_fields:
        if name not in SUPPORTED and getattr(choices, name) != getattr(default, name):
            yield f"{name.replace('_', ' ')} is set, which only llmb's engine supports"
