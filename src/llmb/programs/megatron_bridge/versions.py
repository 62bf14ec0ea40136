# SPDX-License-Identifier: Apache-2.0
"""Versions of Megatron-Bridge: which image has one that is supported, what its scripts can run, and what is done
otherwise in it. Pure but for its data file."""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Dtype, Recipe, Record
from llmb.errors import UsageError
from llmb.runs.choices import Fp8Recipe

DATA = Path(__file__).with_name("megatron_bridge.yaml")
_NEMO = re.compile(r"\bnemo[+:-](\d\d\.\d\d)(?!\d)")
"""NeMo's own names of its images, and those of files that the reference suite's installer makes."""


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


def script_of(data: BridgeFile, own: BridgeRecipe) -> str:
    return data.library_script if own.library else data.script


def version_check(data: BridgeFile, own: BridgeRecipe, variables: Mapping[str, str]) -> str:
    """Shell text that adapts the arguments to the container's version, which only it has; another version ends it."""
    read = 'case $name in MAJOR|MINOR) found="${found:+$found.}$value";; esac'
    found = "${found:-of an unknown version}"
    fitting = fitting_versions(data, own)
    told = f"llmb: this image has {data.framework} {found}, and llmb supports {versions_text(fitting)} for {own.recipe}"
    script = script_of(data, own)
    cases = "".join(f"{one.version}) {_adapted(script, one, variables)};; " for one in fitting)
    return (
        f"found=; while read -r name _ value; do {read}; done <{data.package_info}; "
        f'case "$found" in {cases}*) echo "{told}" >&2; exit 2;; esac'
    )


def fitting_versions(data: BridgeFile, own: BridgeRecipe) -> tuple[BridgeVersion, ...]:
    return tuple(one for one in data.versions if one.library or not own.library)


def versions_text(versions: Sequence[BridgeVersion]) -> str:
    *most, last = (one.version for one in versions)
    return f"{', '.join(most)} and {last}"


def _adapted(script: str, version: BridgeVersion, variables: Mapping[str, str]) -> str:
    """Shell text that gives the arguments the names of ``version``, and leaves variables to it that it sets."""
    renamed = {f"--task {ours}": theirs for ours, theirs in version.tasks.items()}
    named = f'"python {script}") word={version.script};; ' if version.script else ""
    named += "".join(f'"{before}") word={after};; ' for before, after in renamed.items())
    adapt = (
        f'words=(); before=; for word; do own=$word; case "$before $word" in {named}esac; words+=("$word"); '
        'before=$own; done; set -- "${words[@]}"'
    )
    set_here = [shlex.quote(f"{name}={value}") for name, value in variables.items() if name not in version.keeps]
    leave = (
        f"for pair in {' '.join(set_here)}; do name=${{pair%%=*}}; "
        'if [ "${!name-}" = "${pair#*=}" ]; then unset "$name"; fi; done'
    )
    return "; ".join([adapt] * bool(named) + [leave] * version.sets_variables) or ":"


def check_image(image: str | None, recipe: Recipe) -> None:
    """Raises UsageError for an image whose name tells that it has no supported version; others tell when they run.

    None is the image of the first version.
    """
    data, own = bridge_data(), bridge_recipe(recipe)
    if image is None:
        if own and own.library:
            found = versions_text(fitting_versions(data, own))
            what = f"{own.recipe} needs {data.framework} {found}, and the default image has {data.release}"
            raise UsageError(what, do="name an image with one of them: --image")
        return
    named = _NEMO.search(image)
    if named and named.group(1) < data.oldest_nemo:
        what = f"image {image}: NeMo {named.group(1)} has no version of {data.framework} that llmb supports"
        raise UsageError(what, do=f"name an image of NeMo {data.oldest_nemo} or later, or leave --image out")
