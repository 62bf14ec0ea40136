# SPDX-License-Identifier: Apache-2.0
"""Plans a run of the engine from a checkpoint or prepared files, and returns the arguments that repeat a run."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmb.base.errors import UsageError, itemized
from llmb.base.input_files import MOST_JSON_BYTES, read_regular
from llmb.base.options import arguments_of
from llmb.base.trust import check_links
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.custom import UserModel
from llmb.catalogue.packing import chunked_squares
from llmb.catalogue.published import Source
from llmb.catalogue.records import Model, Packing, Recipe, Record
from llmb.catalogue.resolve import CPU, ModelRequest, Overrides, find_workload, resolve
from llmb.readers.samples.host import Device
from llmb.runs.checkpoint_use import check_weights
from llmb.runs.checkpoints.checkpoint import CONTEXT, SavedCheckpoint, model_differences, read_checkpoint
from llmb.runs.checkpoints.origin import DataOrigin, Origin, OriginHere, dataset_title, identity_of
from llmb.runs.checkpoints.prepared_data import (
    RECORD,
    PackedDataset,
    PreparedFolders,
    incomplete_files,
    map_arrays,
    prepared_folders,
)
from llmb.runs.choices import Choices
from llmb.runs.plan import (
    EnginePlan,
    InitialWeights,
    Plan,
    TrainingDataset,
    TrainingInputs,
    data_origin,
    make_plan,
    pretending,
    saved_base,
    weights_origin,
)

SYNTHETIC = "--synthetic"
TOKENIZER = "tokenizer.json"
MOST_DIFFERENCES = 3


@dataclass(slots=True)
class Search:
    """A search for the inputs of a run, which collects inputs that are not prepared, and other problems."""

    catalogue: Catalogue
    recipe: Recipe
    choices: Choices
    folders: PreparedFolders
    missing: dict[str, str] = field(default_factory=dict)
    """The files that are not prepared, with the command that prepares each."""
    problems: list[str] = field(default_factory=list)

    @property
    def source(self) -> Source | None:
        """Origin of the recipe's weights and data; None if it trains from random weights on synthetic tokens."""
        return find_workload(self.catalogue, self.recipe.workload).sources.get(self.recipe.size)

    def inputs(self, resumed: SavedCheckpoint | None) -> TrainingInputs:
        """Find the inputs; add to ``missing`` and ``problems``. ``resumed`` is the checkpoint of a run that resumes."""
        if self.choices.synthetic and (explicit := self._explicit()):
            self.problems.append(f"{explicit} is set, but {SYNTHETIC} trains without it; omit one of them")
            return TrainingInputs()
        imported = resumed if resumed and resumed.record.imported_from else None
        if resumed and not imported:
            return self._resumed(resumed)
        weights = self._imported(imported) if imported else self._weights()
        inputs = TrainingInputs(weights=weights, **self._data())
        if inputs.weights and inputs.dataset and _differ_in_tokenizer(inputs.weights, inputs.dataset):
            again = self._prepare("dataset", f"{self._length()} --force")
            self.problems.append(
                f"the tokenizer of the dataset in {inputs.dataset.path} differs from that of the checkpoint in "
                f"{inputs.weights.path}: prepare the dataset again ({again}; for local samples, also pass --source)"
            )
        return inputs

    def raise_problems(self) -> None:
        if self.problems:
            name = f"{self.recipe.workload} {self.recipe.size}"
            raise UsageError(f"{name} cannot train with these weights and data:{itemized(self.problems)}")

    def not_prepared(self) -> UsageError | None:
        """Return an error with all missing inputs and the commands that prepare them; None if none is missing."""
        if not self.missing:
            return None
        lines = "\n".join(f"  - {what}\n    {command}" for what, command in self.missing.items())
        sample = f"'{self._prepare('sample small', '')}' if there is no folder small, then "
        first = sample if self._sample("") else ""
        do = f"run {first}the commands above, or add {SYNTHETIC} for random weights and synthetic data"
        name = f"{self.recipe.workload} {self.recipe.size}"
        return UsageError(f"these inputs of {name} are not prepared:\n{lines}", do=do)

    def once_prepared(self, plan: EnginePlan) -> EnginePlan:
        """Return ``plan`` with the origin that it will have once its inputs are prepared."""
        inputs = TrainingInputs(weights=plan.weights, dataset=plan.dataset)
        return plan.model_copy(update={"declared_origin": self.origin(inputs)})

    def origin(self, inputs: TrainingInputs) -> Origin:
        """Return the origin that a run from ``inputs`` will have once all inputs are prepared."""
        weights = weights_origin(inputs.weights)
        if self.source is None or self.choices.synthetic or inputs.dataset:
            return Origin(weights=weights, data=data_origin(inputs.dataset, self.recipe.training))
        title = dataset_title(self.source.dataset, self.recipe.layout.seq_len)
        path = str(self._dataset_path(self.source))
        return Origin(weights=weights, data=DataOrigin(kind="dataset", name=title, path=path))

    def _explicit(self) -> str | None:
        return next((f"--{name}" for name in ("weights", "dataset") if getattr(self.choices, name)), None)

    def _weights(self) -> InitialWeights | None:
        if self.choices.weights:
            return self._checked(read_checkpoint(Path(self.choices.weights)))
        if self.source is None or self.choices.synthetic:
            return None
        if self.recipe.proxy:
            proxy = self.recipe.proxy_text
            self.problems.append(f"{proxy} cannot load the weights of the whole model; add {SYNTHETIC}")
            return None
        path = self.folders.model(self.source.model)
        try:
            saved = read_checkpoint(path)
        except UsageError as error:
            why = f": {error.what}" if path.exists() else ""
            self._miss(f"the checkpoint of {self.source.model}, in {path}{why}", "checkpoint", self._sample("model"))
            return InitialWeights(path=str(path), name=self.source.model)
        return self._checked(saved, self.source.model)

    def _checked(self, saved: SavedCheckpoint, name: str | None = None) -> InitialWeights | None:
        differences = list(model_differences(self.recipe.model, saved.record.model))
        if differences:
            advice = f"; a proxy needs {SYNTHETIC}" if self.recipe.proxy and self.source else ""
            shown = "; ".join(differences[:MOST_DIFFERENCES])
            self.problems.append(f"the checkpoint {saved.path} is of another model: {shown}{advice}")
            return None
        return initial_weights(saved, name)

    def _data(self) -> dict[str, TrainingDataset | Packing | None]:
        if self.choices.dataset and self.source is None:
            workload = self.recipe.workload
            self.problems.append(f"--dataset is for recipes that fine-tune; {workload} trains on synthetic tokens")
            return {}
        if self.source is None or self.choices.synthetic:
            return {}
        if self.choices.document_tokens is not None:
            self.problems.append(f"--document-tokens is for synthetic data; omit it, or add {SYNTHETIC}")
            return {}
        if self.choices.dataset:
            return self._read(Path(self.choices.dataset))
        path = self._dataset_path(self.source)
        if not (path / RECORD).is_file():
            title = dataset_title(self.source.dataset, self.recipe.layout.seq_len)
            has_tokenizer = self.missing or self.folders.model(self.source.model).exists()  # with the checkpoint
            sample = self._sample("squad.jsonl" if has_tokenizer else "squad.jsonl --tokenizer small/model")
            self._miss(f"the dataset {title}, in {path}", "dataset", self._length() + sample)
            return {"packing": self.recipe.packing}
        return self._read(path)

    def _dataset_path(self, source: Source) -> Path:
        return self.folders.packed(source.dataset, source.model, "training", self.recipe.layout.seq_len)

    def _read(self, path: Path) -> dict[str, TrainingDataset | Packing | None]:
        check_links(path)
        try:
            packed = PackedDataset.model_validate_json(read_regular(path / RECORD, MOST_JSON_BYTES))
            problems = list(_dataset_problems(packed, self.recipe, self.source))
            if incomplete := list(incomplete_files(path, packed.files)):
                problems.append(f"is damaged: {'; '.join(incomplete)}; prepare it again with --force and its --source")
            packing = None if problems else packing_of(path, packed, self.recipe.model)
        except FileNotFoundError:
            do = f"pass the folder that contains {RECORD} with --dataset"
            self.problems.append(f"there is no dataset in {path}; {do}")
            return {}
        except (OSError, ValidationError, ValueError) as error:
            damaged = "it is damaged, or from another version of llmb; prepare it again with --force and its --source"
            why = error.strerror if isinstance(error, OSError) else damaged
            self.problems.append(f"the dataset in {path} cannot be read: {why}")
            return {}
        self.problems.extend(f"the dataset in {path} {problem}" for problem in problems)
        return {"dataset": TrainingDataset(path=str(path), packed=packed), "packing": packing}

    def _resumed(self, saved: SavedCheckpoint) -> TrainingInputs:
        began = saved.record.origin
        if self._rejects_weights(saved):
            return TrainingInputs()
        if self.source and saved.record.workload != self.recipe.workload:
            instead = "to begin fine-tuning with its weights, pass it with --weights instead of --load-checkpoint"
            self.problems.append(f"the checkpoint is of {saved.record.workload}; {instead}")
            return TrainingInputs()
        weights = None
        if began and began.weights.kind == "checkpoint" and began.weights.path and began.weights.name:
            values = began.weights.model_dump(include={"path", "name", "identity"})
            weights = InitialWeights(**values)
        if saved.record.lora:
            weights = self._base(saved)
        if began is None or began.data.kind == "synthetic" or began.data.path is None:
            if self.choices.dataset:
                self.problems.append("the checkpoint was trained on synthetic data; omit --dataset")
            return TrainingInputs(weights=weights)
        if self.choices.synthetic:
            self.problems.append(f"the checkpoint was trained on {began.data.name}; omit {SYNTHETIC}")
            return TrainingInputs()
        data = self._read(Path(self.choices.dataset or began.data.path))
        dataset = data.get("dataset")
        if isinstance(dataset, TrainingDataset) and identity_of(dataset.packed.crc32) != began.data.identity:
            what = f"the dataset in {dataset.path} is not the one that the checkpoint was trained on"
            self.problems.append(f"{what}; pass the folder of that one with --dataset")
        return TrainingInputs(weights=weights, **data)

    def _base(self, adapters: SavedCheckpoint) -> InitialWeights | None:
        recorded = saved_base(adapters.record)
        if self.choices.weights:
            return self._checked(read_checkpoint(Path(self.choices.weights)), recorded.name if recorded else None)
        if recorded is None:
            return None
        try:
            return self._checked(read_checkpoint(Path(recorded.path)), recorded.name)
        except UsageError as error:
            belong = f"the adapters belong to {recorded.name} in {recorded.path}"
            self.problems.append(f"{belong}, but {error.what}; pass it with --weights if it was moved")
            return None

    def _imported(self, saved: SavedCheckpoint) -> InitialWeights | None:
        if self._rejects_weights(saved):
            return None
        return self._base(saved) if saved.record.lora else initial_weights(saved)

    def _rejects_weights(self, saved: SavedCheckpoint) -> bool:
        rejected = bool(self.choices.weights) and not saved.record.lora
        if rejected:
            self.problems.append("--weights starts a new training run, --load-checkpoint resumes one; omit one of them")
        return rejected

    def _miss(self, what: str, kind: str, options: str = "") -> None:
        self.missing[what] = self._prepare(kind, options)

    def _prepare(self, kind: str, options: str) -> str:
        return f"llmb prepare {kind} -w {self.recipe.workload} -s {self.recipe.size}{options}"

    def _sample(self, name: str) -> str:
        return f" --source small/{name}" if self.source and self.source.page is None else ""

    def _length(self) -> str:
        tables = find_workload(self.catalogue, self.recipe.workload).layouts
        lengths = {table.seq_len for table in tables if table.size == self.recipe.size}
        length = self.recipe.layout.seq_len
        return "" if lengths == {length} else f" --seq-len {length}"


def search_inputs(catalogue: Catalogue, install: Path, recipe: Recipe, choices: Choices) -> Search:
    """Return a search for inputs below the root ``install`` and in the folders that ``choices`` names."""
    return Search(catalogue, recipe, choices, prepared_folders(install, recipe.workload))


def initial_weights(saved: SavedCheckpoint, name: str | None = None) -> InitialWeights:
    """Return a checkpoint as initial weights; the model's ``name`` is by default that of the source folder or run."""
    record = saved.record
    source = record.imported_from
    origin_name = Path(source.path).name if source else f"{record.workload} {record.size} after {record.step} steps"
    return InitialWeights(path=str(saved.path), name=name or origin_name, identity=identity_of(record.crc32))


def packing_of(path: Path, packed: PackedDataset, model: Model) -> Packing:
    """Return the mean statistics of the packs for ``model``'s attention. Raise the errors of ``map_arrays``."""
    chunked = model.chunked_attention
    squares = None
    if chunked and packed.longest_document > chunked.chunk_size:
        ends = map_arrays(path).documents
        squares = chunked_squares((ends[1:] - ends[:-1] - 1).tolist(), chunked.chunk_size) / packed.packs
    return Packing(
        tokens=packed.places_per_pack,
        sum_of_squares=packed.squares_per_pack,
        chunked_sum_of_squares=squares,
        source=f"mean of the {packed.packs:,} packs of {dataset_title(packed.name, packed.seq_len)}",
    )


def _differ_in_tokenizer(weights: InitialWeights, dataset: TrainingDataset) -> bool:
    file = Path(weights.path) / CONTEXT / TOKENIZER
    return file.is_file() and sha256(file.read_bytes()).hexdigest() != dataset.packed.tokenizer.sha256


def _dataset_problems(packed: PackedDataset, recipe: Recipe, source: Source | None) -> list[str]:
    problems = []
    if source and packed.tokenizer.name != source.model:
        problems.append(f"was tokenized for {packed.tokenizer.name}; the run trains {source.model}")
    if packed.seq_len != recipe.layout.seq_len:
        problems.append(f"has packs of {packed.seq_len} tokens; the run has sequences of {recipe.layout.seq_len}")
    if packed.split != "training":
        problems.append(f"is the {packed.split} split; training needs the split 'training'")
    if packed.tokenizer.vocab_size > recipe.model.vocab_size:
        problems.append(f"has a vocabulary of {packed.tokenizer.vocab_size}; the model's is {recipe.model.vocab_size}")
    return problems


class NotPrepared(UsageError):
    """Weights, data or software that the run needs are not prepared. ``plan`` applies after their preparation."""

    def __init__(self, error: UsageError, plan: Plan) -> None:
        super().__init__(error.what, do=error.do)
        self.plan = plan

    @property
    def warning(self) -> str:
        """Return the warning for a dry run, which shows the plan anyway."""
        return f"the run would be rejected: {self.what}"


def origin_here(catalogue: Catalogue, install: Path, recipe: Recipe) -> OriginHere:
    """Return the origin of weights and data for a run of ``recipe`` without further options, and a problem, if any."""
    search = search_inputs(catalogue, install, recipe, Choices())
    origin = search.origin(search.inputs(None))
    try:
        search.raise_problems()
    except UsageError as error:
        return OriginHere(origin=origin, problem=error.what)
    missing = search.not_prepared()
    return OriginHere(origin=origin, problem=missing.what if missing else None)


def plan_training(catalogue: Catalogue, recipe: Recipe, choices: Choices, install: Path) -> EnginePlan:
    """Plan a run with files prepared below ``install``.

    Raise UsageError if impossible, NotPrepared if only prepared files are missing.
    """
    checkpoint = read_checkpoint(Path(choices.load_checkpoint)) if choices.load_checkpoint else None
    search = search_inputs(catalogue, install, recipe, choices)
    inputs = search.inputs(checkpoint)
    device: Device = "cpu" if recipe.gpu_type == CPU else "cuda"
    plan = make_plan(recipe, choices, device=device, checkpoint=checkpoint, inputs=inputs)
    search.raise_problems()
    if missing := search.not_prepared():
        raise NotPrepared(missing, search.once_prepared(plan))
    check_weights(plan)
    return plan


SETTINGS = (
    *("steps", "seed", "fp8_recipe", "emulate_fp8", "recompute", "compiled", "keep_logits", "attention_backend"),
    *("force_load_balancing", "save_checkpoint", "checkpoint_interval", "checkpoint_dir", "verify_checkpoint"),
    *("communication", "free_sms", "group_experts", "deterministic", "stall_limit_s", "parallelism"),
)
"""Choices with the same names as fields of a plan."""
OF_TRAINING = ("peak_lr", "warmup_steps", "grad_reduce_dtype")


def arguments_of_plan(catalogue: Catalogue, plan: EnginePlan) -> list[str]:
    """Return the arguments with which ``llmb run`` and ``submit`` repeat a run.

    Raise UsageError if the catalogue lacks the recipe.
    """
    recipe, rank = plan.recipe, plan.recipe.pretended_rank
    request = _request(recipe)
    if recipe.config_file:  # the file may be gone
        whole = recipe.model.model_copy(update={"layers": recipe.full_layers})
        catalogue = Catalogue(own=UserModel(whole, recipe.config_file))
    usual = resolve(catalogue, request)
    usual_plan = make_plan(usual if rank is None else pretending(usual, rank), Choices(), device=plan.device)
    choices = Choices(**dict(_choices(plan, usual_plan)))
    pretends = [] if rank is None else ["--pretend-scale", str(recipe.scale), "--rank", str(rank)]
    return [*arguments_of(request), *arguments_of(choices), *pretends]


def _request(recipe: Recipe) -> ModelRequest:
    return ModelRequest(
        model_config=recipe.config_file.path if recipe.config_file else None,
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype.value,
        scale=recipe.scale,
        gpu_type=recipe.gpu_type,
        release=recipe.release,
        overrides=Overrides(**{name: getattr(recipe.layout, name) for name in recipe.overridden}),
    )


def _choices(plan: EnginePlan, usual: EnginePlan) -> Iterator[tuple[str, Any]]:
    pairs: list[tuple[str, Record, Record]] = [(name, plan, usual) for name in SETTINGS]
    pairs += [(name, plan.recipe.training, usual.recipe.training) for name in OF_TRAINING]
    for name, own, other in pairs:
        if getattr(own, name) != getattr(other, name):
            yield name, getattr(own, name)
    training = plan.recipe.training
    chose_documents = training.document_lengths == "uniform"  # others follow from the recipe
    if chose_documents and training.document_tokens != usual.recipe.training.document_tokens:
        yield "document_tokens", training.document_tokens
    if plan.window.rule != usual.window.rule:
        yield "window", plan.window.rule
    if plan.capacity_factor != usual.capacity_factor and not plan.force_load_balancing:
        yield "capacity_factor", plan.capacity_factor or 0.0
    if plan.resource_interval_s is None:
        yield "resources", False
    elif plan.resource_interval_s != usual.resource_interval_s:
        yield "resource_interval_s", plan.resource_interval_s
    for name, value in plan.lora or ():
        if value != getattr(usual.lora, name):
            yield f"lora_{name}", value
    yield from _inputs(plan)


def _inputs(plan: EnginePlan) -> Iterator[tuple[str, Any]]:
    fine_tunes = plan.recipe.task != "pretrain"
    if fine_tunes and plan.dataset is None:
        yield "synthetic", True
    elif plan.dataset:
        yield "dataset", plan.dataset.path
    if plan.start:
        yield "load_checkpoint", plan.start.path
        yield "steps", plan.steps  # by default one
    if plan.weights and (plan.lora or not plan.start):
        yield "weights", plan.weights.path
