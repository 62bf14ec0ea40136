# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Bridge's scripts can run in each version that is supported: the records of its data file."""

from functools import cache
from pathlib import Path

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Dtype, Recipe, Record
from llmb.runs.choices import Fp8Recipe

DATA = Path(__file__).with_name("megatron_bridge.yaml")


class BridgeRecipe(Record):
    """A recipe of the script, and the one of the catalogue that it is."""

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
    """Layers or sequences are cut, by TP or CP."""
    variables: dict[str, str]


class BridgeVersion(Record):
    """What one that is supported has otherwise than the first one."""

    version: str
    """Major and minor."""
    tag: str
    """Where its argument parser was read, in its repository."""
    script: str | None = None
    tasks: dict[str, str] = Field(default_factory=dict)
    """Other names of tasks."""
    sets_variables: bool = False
    """The script sets the variables of its recipes itself, unless they are set."""
    keeps: tuple[str, ...] = ()
    """Variables that its launcher sets nevertheless."""
    library: bool = True
    """Overrides of the configuration hold for recipes of its library, too."""


class BridgeFile(Record):
    """``megatron_bridge.yaml``."""

    framework: str
    release: str
    versions: tuple[BridgeVersion, ...]
    oldest_nemo: str
    """The first of NeMo's images that holds a supported version."""
    package_info: str
    """Where the version is in the container."""
    images: dict[str, str]
    script: str
    library_script: str
    gpu_types: tuple[str, ...]
    recipes: tuple[BridgeRecipe, ...]
    dtypes: dict[Dtype, str]
    fp8_recipe: Fp8Recipe
    """What llmb's engine calls the scaling that FP8 has there."""
    gpus_per_numa_node: dict[str, int]
    variables: tuple[BridgeVariables, ...]


@cache
def bridge_data() -> BridgeFile:
    return read_file(DATA, BridgeFile)


def bridge_recipe(recipe: Recipe) -> BridgeRecipe | None:
    named = (recipe.workload, recipe.size)
    return next((item for item in bridge_data().recipes if (item.workload, item.size) == named), None)
