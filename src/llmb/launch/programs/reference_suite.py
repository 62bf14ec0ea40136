# SPDX-License-Identifier: Apache-2.0
"""The reference suite as a program of jobs.

The launch script of a recipe's release queues the job, or is queued, with the variables that describe the recipe. The
log that it writes becomes the log of the run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import lexists
from pathlib import Path

from llmb.base.errors import UsageError, itemized
from llmb.base.missing import Missing
from llmb.base.shown_text import counted
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype, Recipe
from llmb.catalogue.resolve import LayoutSizes, find_workload
from llmb.catalogue.window import resolve_window, rule_of_document
from llmb.launch.documents.documented_paths import nemo_items
from llmb.launch.documents.launch_scripts import (
    CACHES,
    TOKEN,
    LaunchScript,
    changed_files,
    changed_needs,
    filled_path,
    find_launch_script,
    has_nemo_run,
    image_problem,
    launch_scripts,
    unmet_needs,
)
from llmb.launch.documents.variables import LaunchVariable, VariableUse, documented_variables
from llmb.launch.jobspec.job_options import ContainerSettings, FrameworkOptions
from llmb.launch.jobspec.spec import Launch, VariableLayer, read_spec
from llmb.launch.programs.foreign_log import NewLogSteps, has_all_steps, judge_latest_attempt, result_of_log
from llmb.launch.programs.port import End, Program, ProgramRequest, ProgramWork, StepProgress, option_text
from llmb.launch.site.site import Site, suite_checkout
from llmb.prediction.prediction import DOCUMENTS, predicted_step
from llmb.readers.logs.formats import format_called
from llmb.readers.logs.formats.format import Format
from llmb.runs.checkpoints.origin import DataOrigin, Origin, WeightsOrigin, dataset_title
from llmb.runs.checkpoints.prepared_data import prepared_folders
from llmb.runs.choices import DEFAULT_SEED, Choices
from llmb.runs.conclusion import why_contradicting
from llmb.runs.folder import RunFolder, tail
from llmb.runs.plan import Plan, make_plan
from llmb.runs.planning import NotPrepared
from llmb.runs.record import RunRecord, read_job, read_record
from llmb.runs.result import Result

STEPS = 50
"""The number of steps that scripts train unless MAX_STEPS is set; some train fewer to profile or resume."""
LAYOUT = tuple(LayoutSizes.model_fields)
ONLY_OF_LLMB = frozenset({"vboost", "cpu_binding"})
"""Options that only jobs have which llmb starts itself; arguments may set the script's variables for them."""
ALWAYS = ("size", "dtype", "scale", "gpu_type", "gpus_per_node")


def variables_by_option(script: LaunchScript) -> dict[str, LaunchVariable]:
    """Return the variables of ``script`` by the corresponding option of llmb."""
    variables: dict[str, LaunchVariable] = {}
    for variable in documented_variables():
        use = _use(variable, script)
        if use and variable.name in {*script.reads, *script.always}:
            option = use.sets or use.read_for or ("install" if use.install else None)
            if option:
                variables.setdefault(option, variable)
    return variables


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
    """Return the variables to set for the script; there must be no ``script_problems`` with the choices."""
    variables = variables_by_option(script)
    chosen = dict(_always(recipe, gpus_per_node)) | dict(_chosen(script, recipe, choices, steps))
    chosen |= {"image": image, "mounts": ",".join(mounts) or None}
    usual = Catalogue().gpus[recipe.gpu_type].gpus_per_node == gpus_per_node
    values: dict[str, str] = {}
    for option, value in chosen.items():
        variable = variables.get(option)
        if variable is None or value is None:
            continue
        if option in ALWAYS and variable.name not in script.always and (option != "gpus_per_node" or usual):
            continue
        values[variable.name] = _text(variable, script, value)
    for fixed in script.fixed:
        if chosen.get(fixed.option):
            values |= fixed.variables
    return values | {name.upper(): value for name, value in arguments.items()}


def _always(recipe: Recipe, gpus_per_node: int) -> Iterator[tuple[str, object]]:
    yield "size", recipe.size
    yield "dtype", str(recipe.dtype)
    yield "scale", recipe.scale
    yield "gpu_type", recipe.gpu_type
    yield "gpus_per_node", gpus_per_node


def _chosen(script: LaunchScript, recipe: Recipe, choices: Choices, steps: int) -> Iterator[tuple[str, object]]:
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
    """Return the number of steps that the script trains if MAX_STEPS is not set."""
    if not script.fixes_steps:
        return STEPS
    if choices.load_checkpoint:
        return 1
    return choices.profiling.steps_of(recipe.documented_profile) or STEPS


def _text(variable: LaunchVariable, script: LaunchScript, value: object) -> str:
    use = _use(variable, script)
    words = {setting: word for word, setting in use.values.items()} if use else {}
    if value is True:
        return "true"
    return words.get(str(value), str(value))


SUPPORTED = frozenset({"steps", "window", "label", "profiling", "save_checkpoint", "load_checkpoint", "fp8_recipe"})
"""Choices for which a script may have a variable, and choices that only llmb uses."""


def script_problems(
    script: LaunchScript, recipe: Recipe, choices: Choices, steps: int, options: FrameworkOptions
) -> Iterator[str]:
    """Describe the GPU type, choices, image, mounts and arguments that the script does not support."""
    usual, profiling = steps_by_itself(script, recipe, choices), choices.profiling
    if script.fixes_steps and (profiling.profile or profiling.nccl_trace or choices.load_checkpoint) and steps != usual:
        yield f"--steps is {steps}, but profiled, traced and resumed runs always have {counted(usual, 'step')}"
    if choices.profiling.profiler == "torch" or choices.profiling.profile_ranks:
        yield "--profiler torch or --profile-ranks is set, but it uses Nsight Systems and chooses the ranks itself"
    if recipe.gpu_type not in script.gpu_types:
        yield f"it has no settings for {recipe.gpu_type}, only for {', '.join(script.gpu_types)}"
    yield from _unknown_options(script, recipe, choices, steps, options)
    yield from _unknown_arguments(script, options.arguments)


def _unknown_options(
    script: LaunchScript, recipe: Recipe, choices: Choices, steps: int, options: FrameworkOptions
) -> Iterator[str]:
    variables, default = variables_by_option(script), Choices()
    for name in Choices.model_fields:
        if name not in SUPPORTED and getattr(choices, name) != getattr(default, name):
            yield f"{option_text(choices, name)} is set, which the script does not support"
    chosen = [name for name, value in _chosen(script, recipe, choices, steps) if value is not None]
    chosen += [name for name in ("image", "mounts") if getattr(options, name)]
    others = [name for name in recipe.overridden if name not in LAYOUT]
    for option in (*(name for name in chosen if name not in variables), *others):
        yield f"--{option.replace('_', '-')} has no corresponding variable in the script"


def _unknown_arguments(script: LaunchScript, arguments: Mapping[str, str]) -> Iterator[str]:
    variables = variables_by_option(script)
    by_variable = {item.name: option for option, item in variables.items() if option not in ONLY_OF_LLMB}
    for name in arguments:
        variable = name.upper()
        if variable in by_variable:
            yield f"--framework-arg {name} is not valid: pass --{by_variable[variable].replace('_', '-')} instead"
        elif variable not in script.reads:
            yield f"--framework-arg {name} has no effect: the script does not read {variable}"


def scheduler_variables(script: LaunchScript) -> dict[str, str]:
    """Return the names of the script's variables for ``account``, ``partition``, ``time`` and ``flags``, if any."""
    variables = variables_by_option(script)
    pairs = {"account": "account", "partition": "partition", "time": "time_limit", "flags": "slurm_arg"}
    return {name: variables[option].name for name, option in pairs.items() if option in variables}


CONSUMED = re.compile(r"global_step[:=] ?(\d{1,9})\b[^\r\n]{0,400}?consumed_samples[:=] ?(\d{1,12})\b")
"""Matches the counters of steps and samples in the step lines of NeMo 1 and 2."""
IMAGE_VERSION = re.compile(r"nemo[+:](\d+(?:\.\d+)*)")
"""Matches the version in an image's name as enroot and the suite's installer write it."""
MODIFIED = "pass --modified-suite to run it anyway"
NOT_BESIDE = Missing("the reference suite's own script starts the job, without llmb's sampler")


def script_of(recipe: Recipe) -> LaunchScript:
    """Return the launch script of a recipe; raise UsageError if the recipe's release has none."""
    script = find_launch_script(recipe.workload, recipe.size, recipe.release)
    if script is None:
        scripts = [f"{', '.join(item.sizes)} of {item.title}" for item in launch_scripts()]
        of_release = f" of {recipe.release}" if recipe.release else ""
        what = f"the reference suite has no launch script for {recipe.workload} {recipe.size}{of_release}"
        raise UsageError(what, choices=scripts, do="request one of these, with its --release, or omit --framework")
    return script


def checkout_of(script: LaunchScript, options: FrameworkOptions, site: Site) -> Path:
    return Path(options.suite) if options.suite else suite_checkout(site, script.tag)


def environment_of(script: LaunchScript, site: Site) -> Path | None:
    """Return the script's virtual environment, from settings, shell or install root; None if it needs none."""
    if script.queued_by == "scheduler":
        return None
    chosen = site.config.reference_suite.environments.get(script.workload)
    if chosen:
        return Path(chosen).expanduser()
    active = (Path(folder) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if (folder := site.shell.get(name)))
    return next((path for path in active if has_nemo_run(path)), site.install / "venv")


def _values(script: LaunchScript, recipe: Recipe, checkout: Path, site: Site) -> dict[str, str]:
    return {
        "root": str(site.install),
        "folder": str(checkout / script.folder),
        "dtype": str(recipe.dtype),
        "size": recipe.size,
        "gpus": str(recipe.scale),
    }


def unready(script: LaunchScript, recipe: Recipe, options: FrameworkOptions, site: Site) -> Iterator[str]:
    """Describe each obstacle to launching the script from this machine, with a remedy."""
    checkout, install = checkout_of(script, options, site), f"run 'llmb install --suite-release {script.release}'"
    if not (checkout / script.folder / script.script).is_file():
        place = f"{script.folder}/{script.script} in {checkout}"
        yield f"there is no {place}: {install}, or pass --suite with a clone at tag {script.tag}"
        return
    values = _values(script, recipe, checkout, site)
    yield from unmet_needs(script, values)
    if not options.modified_suite:
        yield from (f"{change} ({MODIFIED})" for change in _changes(script, recipe, checkout, site))
    if script.prepares:
        yield from _unready_data(script, recipe, site, checkout)
    environment = environment_of(script, site)
    if environment and not has_nemo_run(environment):
        yield f"there is no NeMo-Run in {environment}: {install}, or set reference_suite.environments"
    version = script.framework.split()[-1]
    other = IMAGE_VERSION.search(Path(options.image or "").name)
    if other and other[1] != version and not options.modified_suite:
        yield f"--image is NeMo {other[1]}, but the release uses {version} ({MODIFIED})"
    image = Path(options.image or filled_path(script.image_file, values))
    if problem := image_problem(image):
        yield f"the image {image} {problem}: import it from {script.image}"
    if TOKEN in script.always and not site.shell.get(TOKEN):
        yield f"{TOKEN} is not set: export it, because the script requires it"


def _unready_data(script: LaunchScript, recipe: Recipe, site: Site, checkout: Path) -> Iterator[str]:
    """Describe the problem with NeMo's checkpoint, if any; a packed dataset may be missing, because NeMo packs it."""
    source = find_workload(Catalogue(), script.workload).sources.get(recipe.size)
    if source is None:
        return
    folders = prepared_folders(site.install, script.workload)
    checkpoint, _ = nemo_items(folders, source.model, source.dataset, recipe.layout.seq_len)
    if checkpoint.state != "complete":
        why = f", {checkpoint.problem}" if checkpoint.problem else ""
        do = f"call ./{script.prepares} in {checkout / script.folder}, as the suite's installer does"
        yield f"{checkpoint.path} is {checkpoint.state}{why}: {do}"


def _unloadable(checkpoint: str | None, site: Site) -> Iterator[str]:
    """Describe why the script, which mounts only the install root and NeMo's cache, cannot load ``checkpoint``."""
    if checkpoint is None:
        return
    path, cache = Path(checkpoint), site.shell.get("NEMO_HOME")
    mounted = [site.install, *([Path(cache)] if cache else [])]
    visible = any(path.is_relative_to(root) for root in mounted)
    if not visible or not any(path.resolve().is_relative_to(root.resolve()) for root in mounted):
        yield f"{path} is not in the container, which mounts only {' and '.join(map(str, mounted))}: move it there"
    if not any(path.glob("weights/*.distcp")):
        yield f"{path} has no weights/*.distcp: pass the folder of a NeMo checkpoint, which contains 'weights'"


def _changes(script: LaunchScript, recipe: Recipe, checkout: Path, site: Site) -> list[str]:
    return [*changed_files(checkout, script), *changed_needs(script, _values(script, recipe, checkout, site))]


class ReferenceSuite(Program):
    """Calls the launch script of the recipe's release in a checkout of the reference suite."""

    name = "reference_suite"

    def plan(
        self, catalogue: Catalogue, recipe: Recipe, choices: Choices, options: FrameworkOptions, site: Site
    ) -> Plan:
        script = script_of(recipe)
        steps = choices.steps_of(recipe, resumes=choices.load_checkpoint is not None)
        recorded = ("cuda", steps, 0, recipe.scale, recipe.documented_profile)
        problems = [
            *script_problems(script, recipe, choices, steps, options),
            *choices.profiling.problems(*recorded),
            *choices.label_problems(),
        ]
        if problems:
            what = f"the launch script of {script.title} does not support this run:{itemized(problems)}"
            raise UsageError(what, do="change these, or omit --framework to use llmb's own engine")
        profile = choices.profiling.settled(*recorded)
        documented, window = _documented(script, recipe, options, site), recipe.documented_window
        rule = rule_of_document(choices.window, window) if documented else choices.window
        plan = Plan(
            recipe=_noted(script, recipe, choices),
            device="cuda",
            steps=steps,
            window=resolve_window(rule, steps, 0, window),
            seed=DEFAULT_SEED,
            fp8_recipe=choices.fp8_recipe_of(recipe) if recipe.dtype is Dtype.FP8 else None,
            save_checkpoint=choices.save_checkpoint,
            profile=profile and profile.model_copy(update={"or_torch": False}),
            nccl_trace=choices.profiling.nccl_trace,
            lora=recipe.lora,
            predicted=predicted_step(catalogue, make_plan(recipe, Choices(), device="cuda"), DOCUMENTS),
            documented_software=documented,
            declared_origin=_origin(script, recipe, site),
        )
        not_ready = [*unready(script, recipe, options, site), *_unloadable(choices.load_checkpoint, site)]
        if not_ready:
            what = f"{script.title} cannot be launched yet:{itemized(not_ready)}"
            raise NotPrepared(
                UsageError(what, do="correct these; 'llmb config check --suite FOLDER' lists a checkout's differences"),
                plan,
            )
        return plan

    def work(self, plan: Plan, request: ProgramRequest, folder: RunFolder) -> ProgramWork:  # noqa: ARG002 (of the port)
        script, recipe, site = script_of(plan.recipe), plan.recipe, request.site
        _check_nodes(script, request.gpus_per_node)
        _check_given(script, request)
        checkout = checkout_of(script, request.options, site)
        values = _values(script, recipe, checkout, site)
        variables = script_variables(
            script,
            recipe,
            request.choices,
            plan.steps,
            request.gpus_per_node,
            request.options.arguments,
            request.options.image,
            request.options.mounts,
        )
        variables = {script.root: str(site.install), **variables}
        environment, names = environment_of(script, site), scheduler_variables(script)
        set_here = variables.keys() | {*names.values(), TOKEN} | CACHES
        launch = Launch(
            queued_by=script.queued_by,
            folder=values["folder"],
            script=f"./{script.script}",
            named=names,
            needed=tuple(name for name, variable in names.items() if variable in script.always),
            removed=tuple(sorted((script.reads | {*script.removed}) - set_here)),
            environment=str(environment) if environment else None,
            logs=tuple(filled_path(item, values) for item in script.logs),
            outputs=tuple(filled_path(item, values) for item in script.outputs),
        )
        return ProgramWork(
            launch=launch,
            secrets=(TOKEN,) if script.queued_by == "script" else (),
            container=ContainerSettings(
                runtime="pyxis", image=request.options.image or filled_path(script.image_file, values)
            ),
            variables=VariableLayer(self.name, variables),
            recipe_variables=False,
            title=f", with {self.name} {script.release} ({script.framework})",
        )

    def started(self, plan: Plan) -> Plan:
        return plan

    def progress(self, folder: RunFolder, plan: Plan) -> StepProgress:
        bring_log(folder)
        log_format = _format(plan)
        outcome = judge_latest_attempt(folder.log, plan.window, log_format)
        return StepProgress(outcome.steps or 0, has_all_steps(plan, outcome, log_format))

    def new_steps(self, folder: RunFolder) -> NewLogSteps:
        return NewLogSteps(folder, _format(read_record(folder).plan), lambda: bring_log(folder))

    def result(self, folder: RunFolder, record: RunRecord, end: End) -> Result:
        bring_log(folder)
        plan, log_format = record.plan, _format(record.plan)
        outcome = judge_latest_attempt(folder.log, plan.window, log_format)
        contradiction = why_contradicting(record, (), log_gpus=outcome.gpus, log_gbs=outcome.gbs) or other_batch(
            folder, plan
        )
        return result_of_log(plan, outcome, end, log_format, None, contradiction, NOT_BESIDE)


def _documented(script: LaunchScript, recipe: Recipe, options: FrameworkOptions, site: Site) -> str | None:
    changed = options.modified_suite and _changes(script, recipe, checkout_of(script, options, site), site)
    return None if changed or options.arguments or options.image else script.framework


def other_batch(folder: RunFolder, plan: Plan) -> str | None:
    """Describe how the log contradicts the plan's steps or samples; None if it does not, or if the run was resumed."""
    counters = CONSUMED.findall(tail(folder.log))
    if not counters or plan.start or plan.first_step:
        return None
    step, samples = int(counters[-1][0]), int(counters[-1][1])
    target = plan.samples_before(step + 1)
    if step < plan.last_step:
        return f"the log is from another recipe: its last step is {step}, but the plan's is {plan.last_step}"
    if samples == target:
        return None
    return f"the log is from another recipe: {samples} samples were consumed by step {step}, but the plan has {target}"


def _format(plan: Plan) -> Format:
    return format_called(script_of(plan.recipe).log_format)


def _origin(script: LaunchScript, recipe: Recipe, site: Site) -> Origin:
    if recipe.task == "pretrain":
        data = DataOrigin(kind="synthetic", name=f"mock data of {script.framework}")
        return Origin(weights=WeightsOrigin(kind="random"), data=data)
    prepared = str(site.install / "workloads" / script.workload / "checkpoint_and_dataset")
    weights = WeightsOrigin(kind="checkpoint", name=f"{recipe.model.model} {recipe.size}, by NeMo", path=prepared)
    data = DataOrigin(kind="dataset", name=dataset_title("squad", recipe.layout.seq_len), path=prepared)
    return Origin(weights=weights, data=data)


def _noted(script: LaunchScript, recipe: Recipe, choices: Choices) -> Recipe:
    notes = (item.note for item in script.fixed if getattr(choices.profiling, item.option))
    return recipe.model_copy(update={"decisions": (*recipe.decisions, *notes)})


def _check_nodes(script: LaunchScript, gpus_per_node: int) -> None:
    if script.gpus_per_node in (None, gpus_per_node):
        return
    what = f"the launch script of {script.title} always uses {script.gpus_per_node} GPUs per node"
    do = f"use whole nodes of {script.gpus_per_node} GPUs, or omit --framework: llmb's engine supports any number"
    raise UsageError(f"{what}, but this job's nodes have {gpus_per_node}", do=do)


def _check_given(script: LaunchScript, request: ProgramRequest) -> None:
    clashing = sorted(request.explicit & (script.reads | {*script.removed}) - CACHES - {TOKEN})
    if clashing:
        do = "omit them; for variables that the script reads, pass llmb's own options or --framework-arg NAME=VALUE"
        what = f"{', '.join(clashing)}, set by --env or cluster_config.yaml, would change what the launch script runs"
        raise UsageError(what, do=do)


def bring_log(folder: RunFolder) -> None:
    """Link the newest log of the run's job, and the output of its batch script, into the run folder once they exist.

    If a restarted job writes a new log, the link is replaced.
    """
    job, launch = read_job(folder), read_spec(folder).launch
    if job is None or launch is None:
        return
    for link, patterns in ((folder.log, launch.logs), (folder.batch_output, launch.outputs)):
        files = [path for pattern in patterns for path in _matching(pattern, job.job_id)]
        newest = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest and not (link.exists() and link.samefile(newest)):
            _link(link, newest)


def _matching(pattern: str, job_id: str) -> Iterator[Path]:
    path = Path(pattern.replace("{job_id}", job_id))
    parts = path.relative_to("/").parts
    first = next((index for index, part in enumerate(parts) if "*" in part), len(parts) - 1)
    return Path("/", *parts[:first]).glob("/".join(parts[first:]))


def _link(link: Path, target: Path) -> None:
    """Create a hard link, so that the run keeps its log; a symbolic link if that fails, as on another file system."""
    if lexists(link):
        link.unlink()
    try:
        link.hardlink_to(target)
    except OSError:
        link.symlink_to(target)
