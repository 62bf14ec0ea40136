# SPDX-License-Identifier: Apache-2.0
"""torchtitan as a program of jobs."""

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe
from llmb.launch.jobspec.job_options import FrameworkOptions
from llmb.launch.jobspec.spec import PYTHON, RUN_FOLDER, VariableLayer, Word
from llmb.launch.programs.foreign_log import (
    NewLogSteps,
    has_all_steps,
    judge_latest_attempt,
    result_of_log,
    samples_beside,
)
from llmb.launch.programs.port import End, Program, ProgramRequest, ProgramWork, StepProgress, requested_container
from llmb.launch.programs.torchtitan.arguments import check_versions, package_version, titan_arguments, titan_plan
from llmb.launch.programs.torchtitan.models import NAME, RELEASE, titan_model
from llmb.launch.site.site import Site
from llmb.readers.logs.formats.torchtitan import FORMAT
from llmb.readers.samples.host import Device
from llmb.runs.choices import Choices
from llmb.runs.conclusion import why_contradicting
from llmb.runs.failure import first_failure
from llmb.runs.folder import RunFolder, tail
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.record import RunRecord
from llmb.runs.result import Result
from llmb.runs.trace_reports import report_profile

WORKER = "llmb.launch.programs.torchtitan.titan_worker"
VARIABLES: dict[Device, dict[str, str]] = {
    "cpu": {"PYTHONUNBUFFERED": "1", "GOMP_SPINCOUNT": "10000"},
    "cuda": {"PYTHONUNBUFFERED": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
}
"""Variables of the workers: unbuffered output; on CPUs, a short spin of waiting threads, as in llmb's engine; on GPUs,
the allocator's setting from torchtitan's own launcher (run_train.sh)."""


class Torchtitan(Program):
    """Trains with torchtitan's trainer, in this Python or in the container's, as llmb's engine does."""

    name = NAME
    runs_here = True

    def check_here(self) -> None:
        check_versions(package_version(NAME), package_version("torch"))

    def plan(
        self, catalogue: Catalogue, recipe: Recipe, choices: Choices, options: FrameworkOptions, site: Site
    ) -> EnginePlan:
        del site
        plan = titan_plan(catalogue, recipe, choices)
        titan_arguments(plan, options.arguments)  # to reject invalid arguments
        return plan

    def work(self, plan: Plan, request: ProgramRequest, folder: RunFolder) -> ProgramWork:
        del folder
        assert isinstance(plan, EnginePlan), "titan_plan made it"
        variables = dict(VARIABLES[plan.device])
        if "PYTORCH_CUDA_ALLOC_CONF" in request.variables:  # the same setting by its earlier name
            variables.pop("PYTORCH_ALLOC_CONF", None)
        return ProgramWork(
            command=tuple(titan_command(plan, request.options)),
            container=requested_container(request.options, request.site.config.container),
            variables=VariableLayer(self.name, variables),
            recipe_variables=False,
            title=f", with {self.name} {RELEASE}",
        )

    def started(self, plan: Plan) -> Plan:
        return plan

    def progress(self, folder: RunFolder, plan: Plan) -> StepProgress:
        outcome = judge_latest_attempt(folder.log, plan.window, FORMAT)
        return StepProgress(outcome.steps or 0, has_all_steps(plan, outcome, FORMAT))

    def new_steps(self, folder: RunFolder) -> NewLogSteps:
        return NewLogSteps(folder, FORMAT)

    def result(self, folder: RunFolder, record: RunRecord, end: End) -> Result:
        outcome = judge_latest_attempt(folder.log, record.plan.window, FORMAT)
        contradiction = why_contradicting(record, (), log_gpus=outcome.gpus, log_gbs=outcome.gbs)
        samples = samples_beside(folder)
        profile = report_profile(folder, record.plan)
        result = result_of_log(record.plan, outcome, end, FORMAT, profile, contradiction, samples)
        failure = first_failure(tail(folder.log)) if result.status == "failed" and not end.cause else None
        return result.model_copy(update={"reason": f"{failure}; {result.reason}"}) if failure else result


def titan_command(plan: EnginePlan, options: FrameworkOptions) -> list[Word]:
    """Return the command of one process: the interpreter, the worker and its arguments."""
    model = titan_model(plan.recipe.model, plan.recipe.layout.layers)
    words: list[Word] = [PYTHON, "-P", "-m", WORKER, RUN_FOLDER]
    words += [RUN_FOLDER.model_copy(update={"before": "--job.dump_folder="})]
    words += [f"--model.name={model.family}", f"--model.flavor={plan.recipe.size}"]
    for name, value in titan_arguments(plan, options.arguments).items():
        words.append(f"--{name}" if value is None else f"--{name}={value}")
    return words
