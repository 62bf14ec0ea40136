# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge as a program of jobs."""

from llmb.base.errors import UsageError
from llmb.catalogue.bridge_figures import is_bridge
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe
from llmb.launch.jobspec.job_options import ContainerSettings, FrameworkOptions
from llmb.launch.jobspec.spec import VariableLayer
from llmb.launch.programs.foreign_log import (
    NewLogSteps,
    has_all_steps,
    judge_latest_attempt,
    result_of_log,
    samples_beside,
)
from llmb.launch.programs.megatron_bridge.command import (
    OFFLINE,
    bridge_command,
    bridge_origin,
    bridge_plan,
    prepared_squad,
    trains_packed,
)
from llmb.launch.programs.megatron_bridge.versions import bridge_data, check_image, nemo_of, script_for
from llmb.launch.programs.port import End, Program, ProgramRequest, ProgramWork, StepProgress
from llmb.launch.site.site import Site
from llmb.prediction.prediction import BRIDGE, predicted_step
from llmb.readers.logs.formats.megatron import FORMAT
from llmb.readers.logs.outcome import LogOutcome
from llmb.runs.choices import Choices
from llmb.runs.conclusion import why_contradicting
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan, make_plan
from llmb.runs.record import RunRecord
from llmb.runs.result import Result
from llmb.runs.trace_reports import report_profile

SAVED = "train_state.pt"
"""The file that the framework writes last into a checkpoint's folder, ``iter_<step>`` (training/checkpointing.py)."""


def is_done(folder: RunFolder, plan: Plan, outcome: LogOutcome) -> bool:
    """Return whether the last step is logged, and the last checkpoint is complete if it was requested."""
    if not has_all_steps(plan, outcome, FORMAT):
        return False
    last = folder.checkpoints_of(plan) / f"iter_{plan.last_step + 1:07d}" / SAVED
    return not plan.save_checkpoint or last.is_file()


class MegatronBridge(Program):
    """Trains with the framework's performance script; llmb's commands in the job run outside of its container."""

    name = "megatron_bridge"

    def plan(
        self, catalogue: Catalogue, recipe: Recipe, choices: Choices, options: FrameworkOptions, site: Site
    ) -> Plan:
        squad = None if choices.synthetic else prepared_squad(catalogue, recipe, site.install)
        origin, packed = bridge_origin(recipe, squad, options.arguments), trains_packed(squad, options.arguments)
        plan = bridge_plan(catalogue, recipe, choices, options.image, origin, packed=packed)
        check_image(options.image, recipe)
        usual = None if recipe.prediction_problem else make_plan(recipe, Choices(), device="cuda", trains=False)
        # The default image is that of the recipe's release if it has the recipe.
        script, document = script_for(catalogue, recipe, options.image), recipe.document
        unchanged = script.own and not options.image and not options.arguments and recipe.expectations
        documented = document.framework if document and unchanged and is_bridge(document.release) else None
        predicted = usual and predicted_step(catalogue, usual, BRIDGE)
        return plan.model_copy(update={"predicted": predicted, "documented_software": documented})

    def work(self, plan: Plan, request: ProgramRequest, folder: RunFolder) -> ProgramWork:
        save_dir = str(folder.checkpoints_of(plan))
        squad = prepared_squad(Catalogue(), plan.recipe, request.site.install)
        used = squad if squad and plan.origin.data.path == str(squad.root) else None
        script, arguments = script_for(Catalogue(), plan.recipe, request.options.image), request.options.arguments
        return ProgramWork(
            command=tuple(bridge_command(script, plan, request.choices, save_dir, arguments, used)),
            start="task-per-gpu",
            container=bridge_container(plan.recipe, request.options, request.site.config.container),
            control_in_container=False,
            variables=VariableLayer(self.name, {**script.variables, **(OFFLINE if used else {})}),
            recipe_variables=False,
            title=f", with {self.name} {script.tag or bridge_data().versions[0].tag}",
        )

    def started(self, plan: Plan) -> Plan:
        return plan

    def progress(self, folder: RunFolder, plan: Plan) -> StepProgress:
        outcome = judge_latest_attempt(folder.log, plan.window, FORMAT)
        return StepProgress(outcome.steps or 0, is_done(folder, plan, outcome))

    def new_steps(self, folder: RunFolder) -> NewLogSteps:
        return NewLogSteps(folder, FORMAT)

    def result(self, folder: RunFolder, record: RunRecord, end: End) -> Result:
        plan = record.plan
        profile = report_profile(folder, plan)
        outcome = judge_latest_attempt(folder.log, plan.window, FORMAT)
        contradiction = why_contradicting(record, (), log_gpus=outcome.gpus, log_gbs=outcome.gbs)
        gpu = Catalogue().gpus.get(plan.recipe.gpu_type)
        nodes = -(-plan.recipe.layout.gpus // gpu.gpus_per_node) if gpu else None
        return result_of_log(plan, outcome, end, FORMAT, profile, contradiction, samples_beside(folder), nodes)


def bridge_container(recipe: Recipe, options: FrameworkOptions, settings: ContainerSettings) -> ContainerSettings:
    """Return the container with the requested or the default image; raise UsageError if there is no runtime."""
    if settings.runtime == "none":
        do = "set 'container: {runtime: pyxis, image: IMAGE}' (or apptainer) in cluster_config.yaml"
        raise UsageError(f"{MegatronBridge.name} requires a container, but this cluster's settings have none", do=do)
    image = options.image or f"{bridge_data().images[settings.runtime]}{nemo_of(recipe, None)}"
    return settings.model_copy(update={"image": image, "mounts": (*settings.mounts, *options.mounts)})
