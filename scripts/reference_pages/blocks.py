# SPDX-License-Identifier: Apache-2.0
"""The generated blocks of pages: sample outputs, a step of llmb beside the published ones, variables of the documents.

Made from code and catalogue, they are never old. The sample result is one of ``make demo`` on two cores.
"""

from collections.abc import Iterator
from pathlib import Path

from llmb.base.options import options_of
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.published import Document
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import Request, resolve
from llmb.catalogue.schema import ConditionEntry, LayoutTable, WorkloadFile
from llmb.jobs.campaigns.proposal import job_options
from llmb.launch.documents.variables import LaunchVariable, VariableUse, documented_variables
from llmb.reports.run_report import answer_text, run_table
from llmb.reports.table import plain_lines
from llmb.runs.choices import Choices
from llmb.runs.conditions import identity_of_plan, title_of
from llmb.runs.plan import make_plan
from llmb.runs.result import Result
from llmb.setup.prepare.preparation_jobs import PrepareChoices
from llmb.verdict.judgement import without_reference
from llmb.verdict.published_verdict import ways_of_engine
from reference_pages.markdown import table

RESULT = Path(__file__).with_name("sample_result.json")
NO_EARLIER = "no earlier runs of this recipe on these nodes, and 2 are needed"


def all_blocks(catalogue: Catalogue) -> dict[str, str]:
    """Return the blocks by the names that pages have for them."""
    steps = {name: step_table(catalogue, catalogue.documents[name]) for name in catalogue.published}
    result = "\n".join(["```text", *sample_result(catalogue), "```"])
    return {"result": result, **steps, "variables": variables_table()}


def sample_result(catalogue: Catalogue) -> list[str]:
    plan = make_plan(
        resolve(catalogue, Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=2)),
        Choices(),
        device="cpu",
    )
    result = Result.model_validate_json(RESULT.read_text())
    answer = answer_text(result, without_reference("not comparable", NO_EARLIER))
    return [*plain_lines(run_table(plan, result, answer=answer, brief=True))]


COLUMNS = ("item", "framework", "llmb", "same", "without it", "what it is", "source")


def step_table(catalogue: Catalogue, document: Document) -> str:
    conditions = catalogue.published[document.document].conditions
    return table(COLUMNS, [row(catalogue, document, entry) for entry in conditions])


def row(catalogue: Catalogue, document: Document, entry: ConditionEntry) -> list[object]:
    recipe = example(catalogue, document, entry)
    plan = make_plan(recipe, Choices(synthetic=recipe.task != "pretrain"), device="cuda")
    own = {**identity_of_plan(plan, "engine", {}).configuration, **ways_of_engine(plan)}.get(entry.key)
    where = ", ".join([*entry.sizes, *entry.dtypes, *entry.gpu_types])
    title = title_of(entry.key) + (f" ({where})" if where else "")
    same = "not known" if own is None else "yes" if own == entry.value else "no"
    slower = "{:g} to {:g} % slower".format(*entry.slower_pct) if entry.slower_pct else ""
    return [title, entry.value, own or "with `vboost: recipe`", same, slower, entry.what, entry.source]


def example(catalogue: Catalogue, document: Document, entry: ConditionEntry) -> Recipe:
    """The first recipe of the document that the entry is about, where ranks share parameters."""
    for workload, layout in layouts(catalogue, document):
        for gpu_type in layout.gpu_types:
            for dtype in layout.dtypes:
                if entry.holds_for(workload.workload, layout.size, dtype, gpu_type):
                    scale = max(item.gpus for item in layout.rows)
                    request = Request(
                        workload=workload.workload, size=layout.size, dtype=dtype, gpu_type=gpu_type, scale=scale,
                        release=document.release,
                    )  # fmt: skip
                    return resolve(catalogue, request)
    raise ValueError(f"no recipe of {document.document} has {entry.key}")


def layouts(catalogue: Catalogue, document: Document) -> Iterator[tuple[WorkloadFile, LayoutTable]]:
    for workload in catalogue.workloads.values():
        for layout in workload.layouts:
            if layout.document == document.document:
                yield workload, layout


def variables_table() -> str:
    columns = ["variable", "meaning", "value", "release", "what llmb makes of it"]
    rows = [
        [f"`{item.name}`", item.meaning, value_text(item), item.releases, "; ".join(uses_of(item))]
        for item in documented_variables()
    ]
    return table(columns, rows)


def value_text(variable: LaunchVariable) -> str:
    none = ", or null" if "none_is" in variable.model_fields_set else ""
    return variable.valid(job_options()) + none


def uses_of(variable: LaunchVariable) -> Iterator[str]:
    for use in variable.uses:
        where = f" ({', '.join(use.workloads)})" if use.workloads else ""
        yield f"{use_text(use)}{' with `--framework`' if use.framework else ''}{where}"
    if variable.preparation:
        same = any(use_text(use) == use_text(variable.preparation) for use in variable.uses)
        yield "`llmb prepare submit`: " + ("the same" if same else use_text(variable.preparation))
    if variable.excludes:
        yield f"not with {', '.join(f'`{name}`' for name in variable.excludes)}"


def use_text(use: VariableUse) -> str:
    if use.passed:
        return "reaches the job in its environment"
    if use.sets:
        options = {**job_options(), **options_of(PrepareChoices)}
        added = "".join(f" and `{options[name].spelled} {value}`" for name, value in use.adds.items())
        words = f" ({', '.join(f'{value} for {name}' for name, value in use.values.items())})" if use.values else ""
        return f"sets `{options[use.sets].spelled}`{words}{added}"
    if use.install:
        return "sets the install root of every command"
    if use.read_for:
        return f"sets `{job_options()[use.read_for].spelled}` of every command that queues jobs"
    if use.accepts:
        return f"must be {' or '.join(use.accepts)}: {use.because}"
    return f"not needed: {use.ignored}" if use.ignored else f"unsupported: {use.refused}"
