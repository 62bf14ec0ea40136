# SPDX-License-Identifier: Apache-2.0
"""Loads and checks the catalogue, and returns the job defaults of a recipe."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from llmb.base.errors import UsageError, unknown
from llmb.base.trust import check_owner, config_folder
from llmb.catalogue.bridge_figures import BridgeTables, is_bridge, read_bridge_tables
from llmb.catalogue.bridge_figures import PublishedFigure as PublishedFigure
from llmb.catalogue.bridge_recipes import ScriptRecipes, read_script_recipes
from llmb.catalogue.custom import FAMILY, USER_WORKLOAD, UserModel, custom_workload
from llmb.catalogue.data_files import CatalogueError, Shape, located, read_file, schema_problems
from llmb.catalogue.layout_check import check_layout
from llmb.catalogue.published import Document, Expectation
from llmb.catalogue.records import Fabric, Gpu, Layout, Model, Recipe, Record
from llmb.catalogue.schema import (
    ConditionEntry,
    DocumentsFile,
    FabricsFile,
    HardwareFile,
    JobEntry,
    JobsEntry,
    LayoutRow,
    LayoutTable,
    ModelFile,
    PublishedFile,
    RatesFile,
    WorkloadFile,
)

Entry = TypeVar("Entry", LayoutTable, JobEntry)


def for_gpus(workload: WorkloadFile, gpus: Mapping[str, Gpu]) -> WorkloadFile:
    """Return a workload with ``gpus_with`` resolved to GPU types, and the types from which others borrow layouts."""
    jobs = workload.jobs.model_copy(
        update={name: _applicable(getattr(workload.jobs, name), gpus) for name in JobsEntry.model_fields}
    )
    layouts = _applicable(workload.layouts, gpus)
    of_suite = [table for table in layouts if table.release and not is_bridge(table.release)]
    documented = of_suite or [table for table in layouts if table.release]
    published = {gpu_type for table in documented for gpu_type in table.gpu_types}
    borrowed = {
        gpu_type: base
        for gpu_type, gpu in gpus.items()
        if gpu_type not in published and (base := next((name for name in gpu.borrows if name in published), None))
    }
    return workload.model_copy(
        update={"jobs": jobs, "layouts": layouts, "borrowed_layouts": {**borrowed, **workload.borrowed_layouts}}
    )


def _applicable(entries: Iterable[Entry], gpus: Mapping[str, Gpu]) -> tuple[Entry, ...]:
    """Return the entries with ``gpus_with`` resolved to names, except entries that then apply to no GPU type."""
    return tuple(item for entry in entries if (item := _with_names(entry, gpus)).gpu_types or entry.gpus_with is None)


def _with_names(entry: Entry, gpus: Mapping[str, Gpu]) -> Entry:
    if entry.gpus_with is None:
        return entry
    kind = entry.gpus_with
    fitting: list[str] = [name for name, gpu in gpus.items() if kind.holds_for(gpu)]
    return entry.model_copy(update={"gpu_types": tuple(dict.fromkeys([*entry.gpu_types, *fitting]))})


Content = TypeVar("Content")

DATA = Path(__file__).parent / "data"


class Published(NamedTuple):
    """The figures that a document publishes, and the conditions of their runs."""

    figures: tuple[PublishedFigure, ...]
    conditions: tuple[ConditionEntry, ...]


class Files(Mapping[str, Content]):
    """The contents of YAML files by name without suffix, read when first used; ``own`` has further contents."""

    def __init__(
        self,
        folders: Iterable[Path],
        read: Callable[[Path], Content],
        own: Mapping[str, Content] = MappingProxyType({}),
    ) -> None:
        self.paths: dict[str, list[Path]] = {name: [] for name in own}
        for folder in folders:
            for path in sorted(folder.glob("*.yaml")):
                self.paths.setdefault(path.stem, []).append(path)
        self.read, self.own = cache(read), own

    def __getitem__(self, name: str) -> Content:
        if name in self.own:
            return self.own[name]
        path, *others = self.paths[name]
        if others:
            raise CatalogueError([f"{others[0]}: the catalogue already has '{name}', in {path}: rename one of them"])
        return self.read(path)

    def __contains__(self, name: object) -> bool:
        return name in self.paths

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


USER_VARIABLE = "LLMB_CATALOGUE"


def user_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the user's catalogue, if any; raise UsageError if ``LLMB_CATALOGUE`` is not a folder or another user
    owns the default."""
    if text := environ.get(USER_VARIABLE, "").strip():
        path = Path(text).expanduser().absolute()
        if not path.is_dir():
            what = f"{USER_VARIABLE} does not name a folder"
            raise UsageError(what, where=str(path), do="set it to an existing folder, or unset it")
        return path
    config = config_folder(environ)
    if config is None or not os.access(config / "catalogue", os.X_OK):  # also if this user may not enter the folder
        return None
    check_owner(config / "catalogue")
    return config / "catalogue"


class Catalogue:
    """All recipes and published figures, read when first used. A part raises CatalogueError if its files are
    invalid."""

    def __init__(self, root: Path = DATA, hardware: Path | None = None, own: UserModel | None = None) -> None:
        """Set the folder of data files, a file of GPU types that take precedence, and the user's own model."""
        self.root, self.hardware, self.own = root, hardware, own
        self.folder = user_folder(os.environ) if root == DATA else None

    def folders(self, name: str) -> list[Path]:
        """Return the paths of ``name``, a folder or file that need not exist, the package's first."""
        return [folder / name for folder in (self.root, self.folder) if folder is not None]

    def _listed(self, name: str, shape: type[Shape], section: str, key: str) -> dict[str, Any]:
        """Return the package's and the user's records in ``name``; raise CatalogueError for a user's duplicate."""
        records: dict[str, Any] = {}
        package, *own = self.folders(name)
        for path in (package, *filter(Path.exists, own)):
            for index, record in enumerate(getattr(read_file(path, shape, wrap=section, foreign=path in own), section)):
                label = getattr(record, key)
                if path in own and label in records:
                    problem = f"the catalogue already has '{label}', in {package}: rename one of them"
                    raise CatalogueError([located(path, (index,), problem)])
                records[label] = _foreign(record) if path in own and isinstance(record, Gpu) else record
        return records

    @cached_property
    def gpus(self) -> Mapping[str, Gpu]:
        path = self.root / "hardware.yaml"
        gpus: dict[str, Gpu] = self._listed(path.name, HardwareFile, "gpus", "gpu_type")
        if self.hardware is not None:
            path = self.hardware
            own = read_file(path, HardwareFile, wrap="gpus", foreign=True).gpus
            gpus |= {gpu.gpu_type: _foreign(gpu) for gpu in own}
        if problems := [
            located(path, (number, "borrows"), f"{gpu.gpu_type} borrows from '{name}', which is not a GPU type")
            for number, gpu in enumerate(gpus.values())
            for name in gpu.borrows
            if name not in gpus
        ]:
            raise CatalogueError(problems)
        return gpus

    @cached_property
    def fabrics(self) -> Mapping[str, Fabric]:
        listed = read_file(self.root / "fabrics.yaml", FabricsFile, wrap="fabrics").fabrics
        return {fabric.fabric: fabric for fabric in listed}

    @cached_property
    def rates(self) -> RatesFile:
        """Return the rates from which steps are predicted, and the error of each kind of prediction."""
        return read_file(self.root / "rates.yaml", RatesFile)

    @cached_property
    def documents(self) -> Mapping[str, Document]:
        return self._listed("documents.yaml", DocumentsFile, "documents", "document")

    @cached_property
    def families(self) -> Mapping[str, Mapping[str, Model]]:
        """Return the models of each family, by the family's name and by size."""
        own = {} if self.own is None else {FAMILY: {self.own.model.size: self.own.model}}
        return Files(self.folders("models"), self._read_models, own)

    @cached_property
    def models(self) -> Mapping[tuple[str, str], Model]:
        return {(name, size): model for name, sizes in self.families.items() for size, model in sizes.items()}

    def is_trainable(self, workload: WorkloadFile, size: str) -> bool:
        """Return whether llmb's engine implements all parts of the model."""
        return self.families[workload.model][size].other_parts is None

    @cached_property
    def workloads(self) -> Mapping[str, WorkloadFile]:
        own = {} if self.own is None else {USER_WORKLOAD: custom_workload(self.root / "custom.yaml", self.own)}
        ready = {name: for_gpus(workload, self.gpus) for name, workload in own.items()}
        return Files(self.folders("workloads"), self._read_workload, ready)

    def is_foreign(self, path: Path) -> bool:
        """Return whether a file did not come with this package."""
        return not path.is_relative_to(self.root)

    def _read_workload(self, path: Path) -> WorkloadFile:
        workload = read_file(path, WorkloadFile, foreign=self.is_foreign(path))
        _check_name(path, "workload", workload.workload)
        models = self._family(path, workload)
        workload = for_gpus(self._with_bridge_tables(workload, models), self.gpus)
        if problems := list(_contradictions(path, workload, models, self.documents)):
            raise CatalogueError(problems)
        return workload

    def _with_bridge_tables(self, workload: WorkloadFile, models: Mapping[str, Model]) -> WorkloadFile:
        layouts = (*workload.layouts, *self.bridge.layouts(workload.workload, models))
        flops = (*workload.published_flops, *self.bridge.flops(workload.workload, models))
        return workload.model_copy(update={"layouts": layouts, "published_flops": flops})

    def _family(self, path: Path, workload: WorkloadFile) -> Mapping[str, Model]:
        if workload.model not in self.families:
            raise CatalogueError([located(path, ("model",), f"model: there is no model '{workload.model}'")])
        return self.families[workload.model]

    @cached_property
    def bridge(self) -> BridgeTables:
        """Return Megatron-Bridge's tables, which have rows for many workloads."""
        return read_bridge_tables(self.root, self.documents)

    @cached_property
    def script_recipes(self) -> ScriptRecipes:
        """Return the recipes of Megatron-Bridge's performance script."""
        return read_script_recipes(self.root)

    @cached_property
    def undescribed(self) -> Mapping[str, tuple[str, ...]]:
        """Return the sizes, by workload, that have published figures, but no description of the model."""
        models = [model for model in self.bridge.file.models if not model.described]
        names = dict.fromkeys(model.workload for model in models)
        return {name: tuple(model.size for model in models if model.workload == name) for name in names}

    @property
    def undescribed_text(self) -> str:
        """Return the undescribed workloads and sizes in one line."""
        names = ", ".join(" ".join((name, *sizes)) for name, sizes in self.undescribed.items())
        return f"figures only, for judging logs: {names}"

    @cached_property
    def figures(self) -> tuple[PublishedFigure, ...]:
        suite = (figure for published in self.published.values() for figure in published.figures)
        return (*suite, *self.bridge.figures)

    def publications(self, document: str | None) -> "Published":
        """Return the figures and conditions of a document; empty if it has none, and for None (llmb's own recipes)."""
        if document is None or not is_bridge(document):
            return self.published.get(document or "") or Published((), ())
        figures = (figure for figure in self.bridge.figures if figure.expectation.release == document)
        return Published(tuple(figures), self.bridge.conditions(document, self.script_recipes))

    @cached_property
    def published(self) -> "Mapping[str, Published]":
        """Return the content of each document except Megatron-Bridge's, by the document's name."""
        return Files(self.folders("expectations"), self._read_published)

    def _read_models(self, path: Path) -> Mapping[str, Model]:
        return _read_models(path, foreign=self.is_foreign(path))

    def _read_published(self, path: Path) -> "Published":
        return _read_published(path, self.documents, foreign=self.is_foreign(path))


def _foreign(gpu: Gpu) -> Gpu:
    return gpu.model_copy(update={"is_foreign": True})


def layout_of(table: LayoutTable, row: LayoutRow) -> Layout:
    return Layout(
        **row.model_dump(exclude={"line", "dp", "ga", "proxy", "vocab_size", "experts"}),
        seq_len=table.seq_len,
        counts_embedding_and_loss=table.counts_embedding_and_loss,
    )


def model_of(model: Model, table: LayoutTable, row: LayoutRow) -> Model:
    """Return the model, or a proxy of it, that a row trains: with the row's layers, vocabulary and experts."""
    changes: dict[str, object] = {"layers": row.layers}
    if vocab_size := row.vocab_size or table.vocab_size:
        changes["vocab_size"] = vocab_size
    if row.experts is not None and model.moe is not None:
        changes["moe"] = model.moe.model_copy(update={"experts": row.experts})
    return model.model_copy(update=changes)


def _read_models(path: Path, *, foreign: bool) -> Mapping[str, Model]:
    family = read_file(path, ModelFile, foreign=foreign)
    _check_name(path, "model", family.model)
    models = {}
    for size, size_model in family.sizes.items():
        fields = {"source": family.source, **family.common, **size_model, "model": family.model, "size": size}
        try:
            models[size] = Model(**fields)
        except ValidationError as error:
            raise CatalogueError(schema_problems(path, error, below=("sizes", size), shape=Model)) from error
    return models


def _check_name(path: Path, key: str, name: str) -> None:
    """Raise CatalogueError if ``name`` is reserved or not the file's name, by which it is found without being read."""
    if name in (USER_WORKLOAD, FAMILY):
        problem = f"{key}: '{name}' is the name of a model that --model-config describes: choose another"
        raise CatalogueError([located(path, (key,), problem)])
    if name != path.stem:
        problem = f"{key}: '{name}' must be '{path.stem}', like the name of its file"
        raise CatalogueError([located(path, (key,), problem)])


def _contradictions(
    path: Path, workload: WorkloadFile, models: Mapping[str, Model], documents: Mapping[str, Document]
) -> Iterator[str]:
    yield from _unknown_names(path, workload, models, documents)
    for number, table in enumerate(workload.layouts):
        model = models.get(table.model_size or table.size)
        for index, row in enumerate(table.rows):
            for problem in _row_problems(model, table, row) if model else ():
                yield located(path, ("layouts", number, "rows", index), problem)
    for size in workload.training:
        try:
            workload.training_for(size)
        except ValidationError as error:
            yield from schema_problems(path, error, below=("training", size))


def _unknown_names(
    path: Path, workload: WorkloadFile, models: Mapping[str, Model], documents: Mapping[str, Document]
) -> Iterator[str]:
    references = [("layouts", i, table.document) for i, table in enumerate(workload.layouts) if table.document]
    references += [("published_flops", i, entry.document) for i, entry in enumerate(workload.published_flops)]
    for section, index, document in references:
        if document not in documents:
            yield located(path, (section, index, "document"), f"unknown document '{document}'")
    places: list[tuple[str | None, tuple[str | int, ...]]] = [
        (getattr(table, key), ("layouts", index, key))
        for index, table in enumerate(workload.layouts)
        for key in ("size", "model_size")
    ]
    places += [(size, ("training", size)) for size in workload.training if size != "common"]
    places += [
        (size, ("jobs", name, index, "sizes"))
        for name in ("time_limits", "variables")
        for index, entry in enumerate(getattr(workload.jobs, name))
        for size in entry.sizes
    ]
    for size, keys in places:
        if size is not None and size not in models:
            yield located(path, keys, f"{workload.model} has no size '{size}'")


def _row_problems(model: Model, table: LayoutTable, row: LayoutRow) -> list[str]:
    layout = layout_of(table, row)
    problems = check_layout(model_of(model, table, row), layout)
    if problems:
        return problems
    printed = {"DP": (row.dp, layout.dp), "GA": (row.ga, layout.ga)}
    return [
        f"the row prints {name} {printed_value}, but its other columns give {derived}"
        for name, (printed_value, derived) in printed.items()
        if printed_value is not None and printed_value != derived
    ]


def _read_published(path: Path, documents: Mapping[str, Document], *, foreign: bool) -> Published:
    published = read_file(path, PublishedFile, foreign=foreign)
    _check_name(path, "document", published.document)
    document = documents.get(published.document)
    if document is None:
        raise CatalogueError([located(path, ("document",), f"unknown document '{published.document}'")])
    return Published(tuple(_figures(published, document)), published.conditions)


def _figures(published: PublishedFile, document: Document) -> Iterator[PublishedFigure]:
    origin = {
        "convention": document.convention,
        "source": document.source,
        "release": document.release,
        "window": document.window,
        "averaged_steps": document.averaged_steps,
    }
    workload = published.workload
    for table in published.tables:
        for row in table.rows:
            expectation = Expectation(
                kind="table",
                **row.model_dump(exclude={"gpus", "notes"}),
                peak_tflops=table.peak_tflops,
                line=table.lines["step_time_s"],
                notes=(*table.notes, *row.notes),
                **origin,
            )
            yield PublishedFigure(workload, table.size, table.dtype, table.gpu_type, row.gpus, expectation)
    for example in published.examples:
        fields = example.model_dump(exclude={"size", "dtype", "gpu_type", "gpus"})
        yield PublishedFigure(
            workload, example.size, example.dtype, example.gpu_type, example.gpus,
            Expectation(kind="example", **fields, **origin, gpu_type_stated=example.gpu_type is not None),
        )  # fmt: skip


class JobVariable(Record):
    """An environment variable that the jobs of a recipe set, and its source."""

    name: str
    value: str
    source: str


class JobDefaults(Record):
    """Default resources of a recipe's job; the site and the user can override them."""

    time_limit_min: int
    time_limit_source: str
    gpus_per_node: int | None
    """Number of GPUs of a node; None on a CPU, where any number of processes fits a node."""
    nvlink_domain_nodes: int
    """Number of whole nodes in an NVLink domain; 0 if it is smaller than a node; 1 on CPUs."""
    variables: tuple[JobVariable, ...]
    vboost: int | None
    """The setting that the published jobs requested on nodes that allow it; None if the jobs requested no setting."""
    vboost_source: str | None


def job_defaults(catalogue: Catalogue, recipe: Recipe) -> JobDefaults:
    """Return the catalogue's defaults for a job of ``recipe``."""
    jobs = catalogue.workloads[recipe.workload].jobs
    limit = next(entry for entry in jobs.time_limits if entry.holds_for(recipe))
    variables = {
        name: JobVariable(name=name, value=value, source=entry.source)
        for entry in jobs.variables
        if entry.holds_for(recipe)
        for name, value in entry.variables.items()
    }
    gpu = catalogue.gpus.get(recipe.gpu_type)
    vboost = next((entry for entry in jobs.vboost if gpu and entry.holds_for(recipe)), None)
    return JobDefaults(
        time_limit_min=limit.minutes,
        time_limit_source=limit.source,
        gpus_per_node=gpu.gpus_per_node if gpu else None,
        nvlink_domain_nodes=gpu.nvlink_domain_gpus // gpu.gpus_per_node if gpu else 1,
        variables=tuple(variables.values()),
        vboost=vboost.level if vboost else None,
        vboost_source=vboost.source if vboost else None,
    )


def find_fabric(catalogue: Catalogue, name: str) -> Fabric:
    if name not in catalogue.fabrics:
        raise unknown("fabric", name, catalogue.fabrics, do="set 'fabric' in cluster_config.yaml to one of these")
    return catalogue.fabrics[name]
