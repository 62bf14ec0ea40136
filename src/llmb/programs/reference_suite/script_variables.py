# SPDX-License-Identifier: Apache-2.0
"""A recipe as variables of the reference suite's launch script."""

from collections.abc import Iterator, Mapping, Sequence

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe
from llmb.reference_suite.launch_scripts import LaunchScript
from llmb.reference_suite.variables import LaunchVariable, VariableUse, documented_variables
from llmb.runs.choices import Choices

STEPS = 50
"""What every script trains unless MAX_STEPS says otherwise."""
LAYOUT = ("tp", "pp", "vp", "cp", "ep", "etp", "mbs", "gbs", "seq_len", "layers")
WHERE = ("install", "account", "partition", "time_limit", "slurm_arg")
"""What the root of installation and the scheduler's options say."""
ALWAYS = ("size", "dtype", "scale", "gpu_type", "gpus_per_node")


def variables_by_option(script: LaunchScript) -> dict[str, LaunchVariable]:
    """The variable of ``script`` that takes what an option of llmb says, by the option's name."""
    found: dict[str, LaunchVariable] = {}
    for variable in documented_variables():
        use = _use(variable, script)
        if use and variable.name in {*script.reads, *script.always}:
            option = use.sets or use.read_for or ("install" if use.install else None)
            if option:
                found.setdefault(option, variable)
    return found


def _use(variable: LaunchVariable, script: LaunchScript) -> VariableUse | None:
    return variable.use_for(script.workload, framework=True) if script.release in variable.releases else None


def script_variables(
    script: LaunchScript,
    recipe: Recipe,
    choices: Choices,
    steps: int,
    gpus_per_node: int,
    arguments: Mapping[str, str],
    image: str | None,
    mounts: Sequence[str],
) -> dict[str, str]:
    """Names and values that the script gets; ``script_problems`` has refused what it cannot take."""
    known = variables_by_option(script)
    chosen = dict(_always(recipe, gpus_per_node)) | dict(_chosen(script, recipe, choices, steps))
    chosen |= {"image": image, "mounts": ",".join(mounts) or None}
    usual = Catalogue().gpus[recipe.gpu_type].gpus_per_node == gpus_per_node
    found: dict[str, str] = {}
    for option, value in chosen.items():
        variable = known.get(option)
        if variable is None or value is None:
            continue
        if option in ALWAYS and variable.name not in script.always and (option != "gpus_per_node" or usual):
            continue
        found[variable.name] = _text(variable, script, value)
    for fixed in script.fixed:
        if chosen.get(fixed.option):
            found |= fixed.variables
    return found | {name.upper(): value for name, value in arguments.items()}


def _always(recipe: Recipe, gpus_per_node: int) -> Iterator[tuple[str, object]]:
    yield "size", recipe.size
    yield "dtype", str(recipe.dtype)
    yield "scale", recipe.scale
    yield "gpu_type", recipe.gpu_type
    yield "gpus_per_node", gpus_per_node


def _chosen(script: LaunchScript, recipe: Recipe, choices: Choices, steps: int) -> Iterator[tuple[str, object]]:
    """What is not as the script has it by itself, by option."""
    for name in LAYOUT:
        if name in recipe.overridden:
            yield name, getattr(recipe.layout, name)
    profiling = choices.profiling
    if steps != steps_by_itself(script, recipe, choices):
        yield "steps", steps
    yield "profile", profiling.profile or None
    yield "profile_start_step", profiling.profile_start_step
    yield "profile_stop_step", profiling.profile_stop_step
    yield "profile_gpu_metrics", profiling.profile_gpu_metrics or None
    yield "nccl_trace", profiling.nccl_trace or None
    yield "save_checkpoint", choices.save_checkpoint or None
    yield "load_checkpoint", choices.load_checkpoint
    yield "fp8_recipe", choices.fp8_recipe


def steps_by_itself(script: LaunchScript, recipe: Recipe, choices: Choices) -> int:
    """The steps that the script trains without MAX_STEPS."""
    if not script.fixes_steps:
        return STEPS
    if choices.load_checkpoint:
        return 1
    return choices.profiling.steps_of(recipe.documented_profile) or STEPS


def _text(variable: LaunchVariable, script: LaunchScript, value: object) -> str:
    """As the script writes it."""
    use = _use(variable, script)
    words = {taken: word for word, taken in use.values.items()} if use else {}
    if value is True:
        return "true"
    return words.get(str(value), str(value))


SUPPORTED = frozenset({"steps", "window", "label", "profiling", "save_checkpoint", "load_checkpoint", "fp8_recipe"})
"""Choices that a script may have a variable for, and those that only llmb reads."""


def script_problems(
    script: LaunchScript, recipe: Recipe, choices: Choices, steps: int, arguments: Mapping[str, str]
) -> Iterator[str]:
    """What the script cannot be asked for."""
    own, recorded = steps_by_itself(script, recipe, choices), choices.profiling.profile or choices.profiling.nccl_trace
    if script.fixes_steps and (recorded or choices.load_checkpoint) and steps != own:
        yield f"--steps is {steps}, and such a run has {own} there"
    if choices.profiling.profiler == "torch" or choices.profiling.profile_ranks:
        yield "it profiles with Nsight Systems, and ranks of its own choice"
    if recipe.gpu_type not in script.gpu_types:
        yield f"it has no settings for {recipe.gpu_type}; it is for {', '.join(script.gpu_types)}"
    yield from _unknown_options(script, recipe, choices, steps)
    yield from _unknown_arguments(script, arguments)


def _unknown_options(script: LaunchScript, recipe: Recipe, choices: Choices, steps: int) -> Iterator[str]:
    known, default = variables_by_option(script), Choices()
    for name in Choices.model_fields:
        if name not in SUPPORTED and getattr(choices, name) != getattr(default, name):
            yield f"{name.replace('_', '-')} is chosen, which is for llmb's engine"
    asked = [name for name, value in _chosen(script, recipe, choices, steps) if value is not None]
    others = [name for name in recipe.overridden if name not in LAYOUT]
    for option in (*(name for name in asked if name not in known), *others):
        yield f"--{option.replace('_', '-')} has no variable there"


def _unknown_arguments(script: LaunchScript, arguments: Mapping[str, str]) -> Iterator[str]:
    known = variables_by_option(script)
    taken = {variable.name: option for option, variable in known.items()}
    for name in arguments:
        variable = name.upper()
        if variable in taken:
            yield f"--framework-arg {name} is what --{taken[variable].replace('_', '-')} says"
        elif variable not in script.reads:
            yield f"--framework-arg {name}: it does not read {variable}"


def named_variables(script: LaunchScript) -> dict[str, str]:
    """The variables for what the scheduler is asked for."""
    known = variables_by_option(script)
    pairs = {"account": "account", "partition": "partition", "time": "time_limit", "flags": "slurm_arg"}
    return {name: known[option].name for name, option in pairs.items() if option in known}
