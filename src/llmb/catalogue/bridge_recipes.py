# SPDX-License-Identifier: Apache-2.0
"""Recipes of Megatron-Bridge's performance script at each version, from data files that
``scripts/read_bridge_recipes.py`` writes."""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from llmb.catalogue.records import PARALLEL, Dtype, Layout, Record

Printed = Annotated[int | None, BeforeValidator(lambda text: int(text) if text else None)]
"""An integer in a cell of a table; None if the cell is empty."""
Way = Annotated[str | None, BeforeValidator(lambda text: text or None)]
SIZES = (*PARALLEL, "mbs", "gbs")
WAYS = {
    "cuda_graphs": "parts of a step that are captured as CUDA graphs",
    "recompute": "activations that the backward pass recomputes",
    "dispatcher": "the exchange of tokens between experts",
    "expert_rows": "balanced routing is forced",
}
"""Conditions of a run that a recipe sets, and their descriptions."""
ALWAYS = ("cuda_graphs", "recompute")
"""Conditions that also apply to models without experts."""


class BridgeSizes(Record):
    """The layout in a row of a table."""

    gpu: str
    gpus: int
    seq: int
    gbs: int
    mbs: int
    tp: int
    pp: int
    cp: int
    vp: Printed
    ep: Printed
    etp: Printed

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that the row has, by the name of the layout's field."""
        printed = {name: getattr(self, name) for name in SIZES}
        return {name: size for name, size in printed.items() if size is not None} | {"seq_len": self.seq}


class ScriptRecipe(BridgeSizes):
    """A recipe of the performance script at one version."""

    version: str
    recipe: str
    task: str
    dtype: Dtype
    usual: bool
    """True if the recipe is also used for numbers of GPUs without a recipe."""
    fsdp: bool
    cuda_graphs: Way
    recompute: Way
    dispatcher: Way
    expert_rows: Way
    variables: int

    @property
    def has_experts(self) -> bool:
        return self.expert_rows is not None

    @property
    def text(self) -> str:
        return ", ".join(f"{name.upper()} {self.sizes.get(name, 1)}" for name in PARALLEL)

    def divides_like(self, sizes: Mapping[str, int]) -> bool:
        """Return whether ``sizes`` divide the model among ranks like the recipe."""
        own, experts = self.sizes, ("ep",) * self.has_experts
        return all(sizes.get(name, 1) == own.get(name, 1) for name in ("tp", "pp", "cp", "vp", *experts))

    def is_laid_out(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the recipe has these ``sizes``, regardless of the global batch size and ETP."""
        return self.divides_like(sizes) and all(sizes[name] == self.sizes[name] for name in ("seq_len", "mbs"))

    def fits(self, layout: Layout) -> bool:
        """Return whether the script needs no arguments beyond this recipe to divide the model like ``layout``."""
        usual = layout.sequence_parallel and not layout.has_custom_split
        experts = not self.has_experts or layout.etp == (self.etp or layout.tp)
        return usual and experts and self.divides_like(layout.model_dump())


@dataclass(frozen=True)
class ScriptRecipes:
    """All recipes of all versions, and the sets of variables by number."""

    recipes: Mapping[tuple[str, str, str], Sequence[ScriptRecipe]]
    variables: Mapping[int, Mapping[str, str]]

    def of_model(self, version: str, recipe: str, task: str) -> Sequence[ScriptRecipe]:
        return self.recipes.get((version, recipe, task), ())

    def find(self, version: str, recipe: str, task: str, gpu_type: str, dtype: Dtype, gpus: int) -> ScriptRecipe | None:
        """Return the recipe that the script uses for a number of GPUs; None if the script has no recipe."""
        fitting = [one for one in self.of_model(version, recipe, task) if (one.gpu, one.dtype) == (gpu_type, dtype)]
        exact = (one for one in fitting if one.gpus == gpus)
        return next(exact, None) or next((one for one in fitting if one.usual), None)


def read_script_recipes(root: Path) -> ScriptRecipes:
    recipes, variables = defaultdict(list), defaultdict[int, dict[str, str]](dict)
    for row in _rows(root / "megatron_bridge_recipes.csv"):
        one = ScriptRecipe.model_validate({**row, "fsdp": bool(row["fsdp"])})
        recipes[one.version, one.recipe, one.task].append(one)
    for row in _rows(root / "megatron_bridge_variables.csv"):
        variables[int(row["set"])][row["name"]] = row["value"]
    return ScriptRecipes(recipes, variables)


def _rows(path: Path) -> Sequence[dict[str, Any]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))
