# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge behind the port of programs."""

from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe
from llmb.errors import UsageError
from llmb.jobspec.node_setup import ContainerSettings
from llmb.jobspec.options import FrameworkOptions
from llmb.jobspec.variables import VariableLayer
from llmb.programs.megatron_bridge.command import (
    bridge_command,
    bridge_data,
    bridge_origin,
    bridge_plan,
    bridge_variables,
    trains_packed,
)
from llmb.programs.megatron_bridge.log import NewLogSteps, judge_latest_attempt
from llmb.programs.megatron_bridge.result import is_done, result_of_log
from llmb.programs.megatron_bridge.squad import OFFLINE, prepared_squad
from llmb.programs.nsys import export_report
from llmb.programs.port import End, Program, ProgramRequest, ProgramWork, StepsDone
from llmb.runs.choices import Choices
from llmb.runs.contradicting_record import why_contradicting
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.profile_report import report_profile
from llmb.runs.record import RunRecord
from llmb.runs.result import Result


class MegatronBridge(Program):
    """Trains with the framework's performance script; what begins and ends the job runs outside of its container."""

    name = "megatron_bridge"

    def plan(
        self,
        catalogue: Catalogue,
        recipe: Recipe,
        choices: Choices,
        options: FrameworkOptions,
        install: Path,
    ) -> Plan:
        squad = None if choices.synthetic else prepared_squad(catalogue, recipe, install)
        origin, packed = bridge_origin(recipe, squad, options.arguments), trains_packed(squad, options.arguments)
        return bridge_plan(catalogue, recipe, choices, origin, packed=packed)

    def work(self, plan: Plan, asked: ProgramRequest, folder: RunFolder) -> ProgramWork:
        save_dir = str(folder.checkpoints_of(plan))
        squad = prepared_squad(Catalogue(), plan.recipe, asked.site.install)
        used = squad if squad and plan.origin.data.path == str(squad.root) else None
        return ProgramWork(
            command=tuple(bridge_command(plan, asked.choices, save_dir, asked.options.arguments, used)),
            start="task-per-gpu",
            container=bridge_container(asked.options, asked.site.config.container),
            control_in_container=False,
            variables=VariableLayer(self.name, {**bridge_variables(plan.recipe), **(OFFLINE if used else {})}),
            recipe_variables=False,
            title=f", with {self.name} {bridge_data().release}",
        )

    def started(self, plan: Plan) -> Plan:
        return plan

    def progress(self, folder: RunFolder, plan: Plan) -> StepsDone:
        outcome = judge_latest_attempt(folder, plan.window)
        return StepsDone(outcome.steps or 0, is_done(folder, plan, outcome))

    def new_steps(self, folder: RunFolder) -> NewLogSteps:
        return NewLogSteps(folder.log)

    def result(self, folder: RunFolder, record: RunRecord, end: End) -> Result:
        plan, lasts = record.plan, record.status in ("queued", "running")
        profile = report_profile(folder, plan, export_report(plan, folder) if lasts else None)
        outcome = judge_latest_attempt(folder, plan.window)
        return result_of_log(plan, outcome, end, profile, why_contradicting(record, (), log_gpus=outcome.gpus))


def bridge_container(options: FrameworkOptions, settings: ContainerSettings) -> ContainerSettings:
    """The framework's image, or the requested one. Raises UsageError if the cluster has no containers."""
    if settings.runtime == "none":
        do = "set 'container: {runtime: pyxis, image: ...}' (or apptainer) in cluster_config.yaml"
        raise UsageError(f"{MegatronBridge.name} runs in its container, and this cluster has none", do=do)
    image = options.image or bridge_data().images[settings.runtime]
    return settings.model_copy(update={"image": image, "mounts": (*settings.mounts, *options.mounts)})
