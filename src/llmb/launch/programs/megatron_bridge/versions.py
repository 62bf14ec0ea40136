# SPDX-License-Identifier: Apache-2.0
"""Describes Megatron-Bridge's versions. Finds, for a recipe, the versions whose performance script can run it, the
script's own recipe, and the variables that the framework's launcher would set."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import Field

from llmb.base.errors import UsageError
from llmb.catalogue.bridge_figures import PREFIX
from llmb.catalogue.bridge_recipes import ScriptRecipe
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Dtype, Recipe, Record
from llmb.runs.choices import Fp8Recipe

DATA = Path(__file__).with_name("megatron_bridge.yaml")
_NEMO = re.compile(r"\bnemo[+:-](\d\d\.\d\d(?:\.(?!00)\d\d)?)(?!\d)")
"""Matches the NeMo version in names of NVIDIA's images, and of files that the reference suite's installer creates."""


class BridgeRecipe(Record):
    """A recipe of the script, and the workload and size in the catalogue that it corresponds to."""

    workload: str
    size: str
    family: str
    recipe: str
    task: str
    names_stages: bool = False
    """True if the script's recipes for this model name the layers of each pipeline stage."""
    library: bool = False
    """True if the recipe is in the framework's library, whose recipes are not tuned for a GPU and support only bf16."""


class BridgeVariables(Record):
    """Environment variables for some recipes; an empty list selects all."""

    recipes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    dtypes: tuple[Dtype, ...] = ()
    gpu_types: tuple[str, ...] = ()
    cuts_layers: bool | None = None
    """True for recipes with TP or CP above 1, False for all others, None for both."""
    variables: dict[str, str]


class BridgeVersion(Record):
    """A supported version of the framework, and its differences from the first version."""

    version: str
    """The major and minor version."""
    tag: str
    """The tag in the framework's repository at which its argument parser was read."""
    nemo: str
    """The NeMo release whose images, in all of its patch releases, contain this version."""
    script: str | None = None
    tasks: dict[str, str] = Field(default_factory=dict)
    """This version's names of tasks, by their names in the first version."""
    sets_variables: bool = False
    """True if the script sets the variables of its recipes itself unless they are already set."""
    keeps: tuple[str, ...] = ()
    """Variables that llmb must set even if ``sets_variables`` is True, as the framework's launcher does."""
    library: bool = True
    """True if overrides of the configuration also apply to recipes of the library."""


class BridgeFile(Record):
    """The content of ``megatron_bridge.yaml``."""

    framework: str
    versions: tuple[BridgeVersion, ...]
    default_nemo: str
    """The NeMo release of the default image, unless the recipe's own release is supported."""
    package_info: str
    """The path of the file in the container that contains the version."""
    images: dict[str, str]
    """The names of NeMo images by container runtime, without the release at the end."""
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


def fitting_versions(recipe: BridgeRecipe) -> tuple[BridgeVersion, ...]:
    return tuple(one for one in bridge_data().versions if one.library or not recipe.library)


def versions_text(versions: Sequence[BridgeVersion]) -> str:
    return " and ".join(filter(None, (", ".join(one.version for one in versions[:-1]), versions[-1].version)))


def nemo_of(recipe: Recipe, image: str | None) -> str | None:
    """Return the NeMo release of an image according to its name; of the default image if ``image`` is None.

    If the name contains no release, assume the default for a model with experts, and return None for other models.
    """
    data, release = bridge_data(), (recipe.release or "").removeprefix(PREFIX)
    if match := _NEMO.search(image or ""):
        return match[1]
    if image and not recipe.model.moe:
        return None
    return release if version_of(release) else data.default_nemo


def version_of(nemo: str | None) -> BridgeVersion | None:
    return next((one for one in bridge_data().versions if nemo and nemo.startswith(one.nemo)), None)


@dataclass(frozen=True, slots=True)
class Script:
    """How to start Megatron-Bridge's performance script for a recipe."""

    entry: BridgeRecipe
    versions: tuple[BridgeVersion, ...]
    """The supported versions that the image may have."""
    tag: str | None
    """The tag of the version in the image; None if ``base`` is None."""
    base: ScriptRecipe | None
    """The script's recipe, if the arguments depend on it; otherwise None."""
    own: bool
    """True if the image's patch version is known, and the run has the layers and parallelism of ``base``."""
    variables: Mapping[str, str]
    """Environment variables that the framework's own launcher would set."""

    def version_check(self) -> str:
        """Return shell text that adapts the command to the version in the image, or exits if that is not supported."""
        data, versions = bridge_data(), versions_text(self.versions)
        read = 'case $name in MAJOR|MINOR) found="${found:+$found.}$value";; esac'
        needs = f"llmb supports {versions}" if len(self.versions) > 1 else f"this job needs {versions}"
        what = f"{data.framework} ${{found:-of an unknown version}}, and {needs} for {self.entry.recipe}"
        script = script_of(data, self.entry)
        cases = "".join(f"{one.version}) {_adapted(script, one, self.variables)};; " for one in self.versions)
        return (
            f"found=; while read -r name _ value; do {read}; done <{data.package_info}; "
            f'case "$found" in {cases}*) echo "llmb: this image has {what}" >&2; exit 2;; esac'
        )


def script_for(catalogue: Catalogue, recipe: Recipe, image: str | None) -> Script:
    """Return how to start the script for a recipe that has no ``script_problems``."""
    entry = bridge_recipe(recipe)
    assert entry is not None, "script_problems rejects other recipes"
    nemo, several = nemo_of(recipe, image), fitting_versions(entry)
    version, base = version_of(nemo), None if entry.library else _base(catalogue, recipe, entry, nemo)
    tag = catalogue.bridge.file.versions.get(nemo or "")
    own = bool(tag and base and base.fits(recipe.layout) and not recipe.proxy)
    if version is None or base is None or not (own or base.has_experts):
        return Script(entry, several, None, None, False, bridge_variables(recipe))
    return Script(entry, (version,), tag or version.tag, base, own, catalogue.script_recipes.variables[base.variables])


def _base(catalogue: Catalogue, recipe: Recipe, entry: BridgeRecipe, nemo: str | None) -> ScriptRecipe | None:
    version = version_of(nemo)
    tag = catalogue.bridge.file.versions.get(nemo or "", version.tag if version else "")
    place = (recipe.gpu_type, recipe.dtype, recipe.layout.gpus)
    return catalogue.script_recipes.find(tag, entry.recipe, entry.task, *place)


def script_problems(catalogue: Catalogue, recipe: Recipe, image: str | None) -> Iterator[str]:
    """Yield why the script's own recipes in the image, as far as they are known, do not fit ``recipe``."""
    entry, nemo = bridge_recipe(recipe), nemo_of(recipe, image)
    version = version_of(nemo)
    trains = recipe.gpu_type in bridge_data().gpu_types and recipe.dtype in bridge_data().dtypes
    if entry is None or entry.library or version is None or not trains:
        return
    if (base := _base(catalogue, recipe, entry, nemo)) is None:
        of_model = catalogue.script_recipes.of_model(version.tag, entry.recipe, entry.task)
        have = "; ".join(f"{gpu} in {', '.join(dtypes)}" for gpu, dtypes in _by_gpu(of_model).items())
        what = f"NeMo {nemo} has no {entry.task} recipe {entry.recipe} for {recipe.gpu_type} in {recipe.dtype}"
        yield f"{what}; it has {have or 'none'}"
    elif base.has_experts:
        layout = recipe.layout
        if recipe.proxy:
            yield f"--layers {layout.layers}: its recipes for models with experts always have all layers"
        elif not version.sets_variables and not base.fits(layout):
            newest = bridge_data().versions[-1].nemo
            yield f"its layout of {entry.recipe} is {base.text}; only NeMo {newest} supports another one"
        elif entry.names_stages and (layout.pp, layout.vp) != (base.pp, base.vp or 1):
            yield f"PP {layout.pp} and VP {layout.vp}: its recipe fixes the layers of each stage, for {base.text}"


def _by_gpu(recipes: Sequence[ScriptRecipe]) -> dict[str, list[str]]:
    dtypes: dict[str, dict[str, None]] = {}
    for one in recipes:
        dtypes.setdefault(one.gpu, {})[one.dtype] = None
    return {gpu: [*names] for gpu, names in dtypes.items()}


def _adapted(script: str, version: BridgeVersion, variables: Mapping[str, str]) -> str:
    """Return shell text that adapts the arguments to ``version``, and unsets the variables that its script sets."""
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
    return "; ".join([adapt] * bool(cases) + [leave] * (version.sets_variables and bool(pairs))) or ":"


def check_image(image: str | None, recipe: Recipe) -> None:
    """Raise UsageError if an image's name shows an unsupported version; the job checks the version in any case.

    If ``image`` is None, the default image is checked.
    """
    data, entry = bridge_data(), bridge_recipe(recipe)
    version = version_of(nemo_of(recipe, image))
    if entry and version and version not in (fitting := fitting_versions(entry)):
        has = "the default image" if image is None else f"image {image}"
        what = f"{entry.recipe} does not run in {data.framework} {version.version}, which {has} contains"
        choices = [f"NeMo {one.nemo} ({one.version})" for one in fitting]
        raise UsageError(what, choices=choices, do="pass --image with an image of one of these releases")
    if (nemo := nemo_of(recipe, image)) and version is None:
        what = f"image {image}: NeMo {nemo} has no version of {data.framework} that llmb supports"
        supported = [f"NeMo {one.nemo} ({one.version})" for one in data.versions]
        raise UsageError(what, choices=supported, do="pass --image with one of these versions, or omit --image")


def bridge_variables(recipe: Recipe) -> dict[str, str]:
    """Return the environment variables that the framework's own launcher sets for this recipe."""
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
