# SPDX-License-Identifier: Apache-2.0
"""Rows of Megatron-Bridge's performance tables, as layouts, FLOPs, conditions and published figures. Pure except for
reading two data files."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from llmb.catalogue.bridge_recipes import ALWAYS, WAYS, BridgeSizes, Printed, ScriptRecipes
from llmb.catalogue.data_files import read_file
from llmb.catalogue.published import Document, Expectation
from llmb.catalogue.records import Dtype, Model, Record
from llmb.catalogue.schema import ConditionEntry, FlopsEntry, LayoutRow, LayoutTable

PREFIX = "mb-"
"""Prefix of the names of Megatron-Bridge's releases; the rest is the release of NeMo's container."""
NEWEST = "mb"
"""Name for the newest of these releases that has the recipe."""
DECIMALS = 4


class BridgeModel(Record):
    """The name of a model in the tables, and the workload and size that it corresponds to."""

    name: str
    task: str
    workload: str
    size: str
    experiment: str
    """The prefix of the names of Megatron-Bridge's experiments with this model."""
    described: bool = True
    """True if the catalogue describes the model and has recipes; otherwise, its figures are used only to judge logs."""

    @property
    def recipe(self) -> str:
        """The name of the model's recipe in Megatron-Bridge's performance script."""
        return self.experiment.removeprefix(f"{self.task}_")


class BridgeErratum(Record):
    """A printed layout that is impossible. Its row is used for its figures, but not as a layout."""

    release: str
    line: int
    dtype: str
    note: str


class BridgeTablesFile(Record):
    """The content of ``megatron_bridge.yaml``."""

    releases: tuple[str, ...]
    versions: dict[str, str]
    """The version of Megatron-Bridge in the container of a release, if its recipes are known."""
    dtypes: dict[str, Dtype]
    models: tuple[BridgeModel, ...]
    errata: tuple[BridgeErratum, ...]
    conditions: dict[str, tuple[ConditionEntry, ...]]
    """The conditions by release; the conditions of ``all`` apply to every release."""


class BridgeRow(BridgeSizes):
    """A row of ``megatron_bridge.csv``: as printed, with the step time and tokens/s derived from it."""

    release: str
    model: str
    task: str
    dtype: str
    fsdp: Printed
    """Number of ranks that shard the parameters; 0 without FSDP, None if the table does not print it."""
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    path: str
    line: int
    commit: str
    step_s_from_tokens: float
    tokens_from_tflops: float
    """Tokens/s per GPU, from TFLOP/s and the model's FLOPs per token."""
    rounding_pct: str
    """The possible error in percent of tokens/s that are rounded to whole samples per second; otherwise empty."""
    notes: str

    @property
    def step_time_s(self) -> float:
        """The step time in seconds, from tokens/s or, if these are rounded (see ``rounding_pct``), from TFLOP/s."""
        if not self.rounding_pct:
            return self.step_s_from_tokens
        return round(self.gbs * self.seq / (self.tokens_from_tflops * self.gpus), DECIMALS)


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """A published figure and the recipe it belongs to; ``gpu_type`` is None if the document does not state it."""

    workload: str
    size: str
    dtype: str
    gpu_type: str | None
    gpus: int
    expectation: Expectation
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the layout that Megatron-Bridge prints with the figure; empty for other documents."""

    @property
    def title(self) -> str:
        return f"{self.workload} {self.size} {self.dtype} on {self.gpus} x {self.gpu_type}"


@dataclass(frozen=True)
class BridgeTables:
    """All rows of the tables, in the order of the file."""

    file: BridgeTablesFile
    rows: tuple[BridgeRow, ...]
    documents: Mapping[str, Document]

    @cached_property
    def named(self) -> list[tuple[BridgeModel, BridgeRow]]:
        """The rows, each with its model."""
        models = {(model.name, model.task): model for model in self.file.models}
        return [(models[row.model, row.task], row) for row in self.rows]

    @cached_property
    def figures(self) -> tuple[PublishedFigure, ...]:
        return tuple(
            PublishedFigure(model.workload, model.size, self.file.dtypes[row.dtype], row.gpu, row.gpus,
                            self._expectation(row), row.sizes)
            for model, row in self.named
        )  # fmt: skip

    def _expectation(self, row: BridgeRow) -> Expectation:
        document = self.documents[PREFIX + row.release]
        return Expectation(
            kind="table",
            step_time_s=row.step_time_s,
            tokens_per_s=row.tokens_per_s_per_gpu * row.gpus,
            tflops_per_gpu=row.tflops_per_gpu,
            mfu_pct=None,
            days_per_1t_tokens=None,
            peak_tflops=None,
            convention=document.convention,
            source=f"Megatron-Bridge {row.path}, commit {row.commit}",
            line=row.line,
            release=document.release,
            window=None,
            window_reason=document.window_reason,
            notes=tuple(filter(None, (row.notes, self._erratum(row)))),
        )

    def _erratum(self, row: BridgeRow) -> str | None:
        key = (row.release, row.line, row.dtype)
        return next((one.note for one in self.file.errata if (one.release, one.line, one.dtype) == key), None)

    def conditions(self, release: str, recipes: ScriptRecipes) -> tuple[ConditionEntry, ...]:
        """Return the training conditions of the rows of a release."""
        rows = [(model, row) for model, row in self.named if PREFIX + row.release == release]
        ways = (way for model, row in rows for way in (*self._sharding(model, row), *self._ways(model, row, recipes)))
        stated = (self.file.conditions.get(name, ()) for name in ("all", release.removeprefix(PREFIX)))
        return (*dict.fromkeys(ways), *chain.from_iterable(stated))

    def _entry(
        self, model: BridgeModel, row: BridgeRow, key: str, value: str | None, what: str, source: str
    ) -> ConditionEntry:
        dtype = self.file.dtypes[row.dtype]
        of = {"workloads": (model.workload,), "sizes": (model.size,), "dtypes": (dtype,), "gpu_types": (row.gpu,)}
        return ConditionEntry(key=key, value=value, what=what, source=source, **of)

    def _sharding(self, model: BridgeModel, row: BridgeRow) -> Iterator[ConditionEntry]:
        if row.fsdp:
            what = f"FSDP in the table: parameters, gradients and optimizer state, over {row.fsdp} GPUs"
            source = f"Megatron-Bridge {row.path} line {row.line}, commit {row.commit}"
            yield self._entry(model, row, "parallelism.dp_sharding", "full", what, source)

    def _ways(self, model: BridgeModel, row: BridgeRow, recipes: ScriptRecipes) -> Iterator[ConditionEntry]:
        """Yield the conditions that a script recipe sets for a row, and as unknown the others that ``ALWAYS`` lists."""
        version, dtype = self.file.versions.get(row.release), self.file.dtypes[row.dtype]
        found = version and recipes.find(version, model.recipe, row.task, row.gpu, dtype, row.gpus)
        recipe = found if found and found.is_laid_out(row.sizes) else None
        of = f"Megatron-Bridge {version}, recipe {model.recipe} for {row.gpus} {row.gpu} in {dtype}"
        why = f"the recipe leaves it to a default ({of})" if recipe else f"no recipe from {row.release} was read"
        for key, what in WAYS.items():
            value = getattr(recipe, key, None)
            if value or key in ALWAYS:
                yield self._entry(model, row, key, value, what, of if value else f"not known: {why}")

    def layouts(self, workload: str, models: Mapping[str, Model]) -> tuple[LayoutTable, ...]:
        """Return the layouts of a workload, without impossible ones, the oldest release first."""
        return tuple(
            LayoutTable(
                size=model.size,
                release=PREFIX + row.release,
                document=PREFIX + row.release,
                gpu_types=(row.gpu,),
                dtypes=(self.file.dtypes[row.dtype],),
                seq_len=row.seq,
                above_largest="double",
                counts_embedding_and_loss=_counts_ends(row, models[model.size].layers),
                rows=(LayoutRow(line=row.line, gpus=row.gpus, layers=models[model.size].layers, **_layout_sizes(row)),),
            )
            for model, row in self.named
            if model.workload == workload and model.described and not self._erratum(row)
        )

    def flops(self, workload: str, models: Mapping[str, Model]) -> Iterator[FlopsEntry]:
        """Yield the documents' FLOPs of a sequence for each size and release, from the first row with both."""
        found: dict[tuple[str, str], FlopsEntry] = {}
        for model, row in self.named:
            if model.workload == workload and model.described:
                found.setdefault(
                    (model.size, row.release),
                    FlopsEntry(
                        size=model.size,
                        document=PREFIX + row.release,
                        seq_len=row.seq,
                        layers=models[model.size].layers,
                        printed_flops=float(f"{row.seq * row.tflops_per_gpu / row.tokens_from_tflops * 1e12:.4g}"),
                        line=row.line,
                        formula="causal",
                    ),
                )
        yield from found.values()

    def model_of_experiment(self, experiment: str) -> BridgeModel | None:
        return next((model for model in self.file.models if model.experiment == experiment), None)


def _layout_sizes(row: BridgeRow) -> dict[str, Any]:
    return {name: size for name, size in row.sizes.items() if name != "seq_len"}


def _counts_ends(row: BridgeRow, layers: int) -> bool:
    """Return whether the layers divide evenly only if the embedding and the loss count as one layer each."""
    stages = row.pp * (row.vp or 1)
    return layers % stages != 0 and (layers + 2) % stages == 0


def is_bridge(release: str) -> bool:
    return release.startswith(PREFIX)


def read_bridge_tables(root: Path, documents: Mapping[str, Document]) -> BridgeTables:
    with (root / "megatron_bridge.csv").open(newline="") as stream:
        rows = tuple(BridgeRow.model_validate(row) for row in csv.DictReader(stream))
    return BridgeTables(read_file(root / "megatron_bridge.yaml", BridgeTablesFile), rows, documents)
