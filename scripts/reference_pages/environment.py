# SPDX-License-Identifier: Apache-2.0
"""docs/reference/environment.md: the environment variables of the reference documents, and what llmb makes of them."""

from collections.abc import Iterator

from llmb.campaigns.proposal import job_options
from llmb.options.option import options_of
from llmb.prepare.jobs import PrepareChoices
from llmb.reference_suite.variables import LaunchVariable, VariableUse, documented_variables
from reference_pages.markdown import page, table

INTRO = """`llmb launch WORKLOAD` reads these variables, with the names that the reference documents and their scripts
give them ([how to](../how-to/use-environment-variables.md)). An empty value is none. Options of the command line come
first. A variable that does not apply to the workload, has a bad value or contradicts another one is rejected, all of
them at once.

`llmb prepare submit` reads the variables for which the last column names it, and those of every command that queues
jobs. It reports others that are set, and does not take them.

`release` is that of the documents or scripts that know a variable; 26.06 is the reference suite's newest and no
document of the catalogue. The page is generated from `src/llmb/reference_suite/variables.yaml` and from the options'
declarations, which define valid values."""
ERRATA = """## Errata of the reference scripts

These errors of the scripts are not repeated:

- `GBS` is honored at the 405b proxies as well; the script of 24.11 replaces it there.
- `GPUS_PER_NODE` is honored everywhere; the script of Nemotron4 always uses 8, and so does that of 24.11. With
  `--framework reference_suite` these two therefore refuse any other number.
- `MODEL_SIZE` is honored everywhere; the script of 25.12 never reads it. A size that the workload lacks is rejected.
- `ENABLE_PROFILE` and `ENABLE_NCCLTRACE` together are rejected; the script of 25.04 runs both.
- `ENABLE_PROFILE` queues the profiled run alone; the script of 25.04's Llama queues a plain run beside it. `llmb
  launch` says so where it calls that script.
- `DTYPE` is bf16 where it is left out, as the newer documents have it; scripts of 24.11 and of Nemotron4 take fp8.
- A small `JOB_TOTAL_GPUS` of 405b is a proxy as in the scripts, but the script's output and `llmb list` say so."""


def environment_page() -> str:
    columns = ["variable", "meaning", "value", "release", "what llmb makes of it"]
    rows = [
        [f"`{item.name}`", item.meaning, value_text(item), item.releases, "; ".join(uses_of(item))]
        for item in documented_variables()
    ]
    return page("# Environment variables", INTRO, table(columns, rows), ERRATA)


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
        words = "".join(f" {value} for {name}" for name, value in use.values.items())
        return f"sets `{options[use.sets].spelled}`{words}{added}"
    if use.install:
        return "the root of installation, with every command"
    if use.read_for:
        return f"stands for `{job_options()[use.read_for].spelled}` with every command that queues jobs"
    if use.accepts:
        return f"must be {' or '.join(use.accepts)}: {use.because}"
    return f"not needed: {use.ignored}" if use.ignored else f"unsupported: {use.refused}"
