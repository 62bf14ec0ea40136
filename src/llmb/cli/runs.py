# SPDX-License-Identifier: Apache-2.0
"""``llmb runs`` and ``llmb result``, and functions that print results for all commands that wait for a run."""

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from llmb.base.errors import EnvironmentProblem, InvalidRun, LlmbError, RunFailed, UsageError
from llmb.cli.common import Json, is_verbose
from llmb.cli.jobs import Selected
from llmb.cli.root import install_here, say
from llmb.cli.shared_options import complete_run, takes
from llmb.jobs.find_runs import find_runs, run_folders
from llmb.jobs.judge_runs import Against, judge_runs
from llmb.jobs.local_run import raise_unless_successful
from llmb.jobs.states import read_step_times
from llmb.launch.programs.conclude import EndedRun, read_ended_run
from llmb.reports.formats import step_chart
from llmb.reports.jobs_report import jobs_document, runs_table
from llmb.reports.output import print_output
from llmb.reports.run_report import (
    add_other_runs,
    answer_text,
    machine_table,
    repeats_document,
    repeats_tables,
    run_document,
    run_table,
)
from llmb.reports.sweep_report import fp8_sentences, sweep_rows, sweep_table
from llmb.runs.conditions import identity_of
from llmb.runs.folder import RunFolder
from llmb.runs.result import Verdict
from llmb.runs.steps import read_steps

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes(Selected)
def runs(
    selected: Selected,
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Show only runs with this status, such as success. Repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """List the runs of this install root, on this machine and on a cluster, the newest last.

    `llmb result` and `llmb jobs show` accept the id of a run, or the beginning of the id, or `latest`. A run that was
    retried is listed once.

    Examples:

    - `llmb runs`

    - `llmb runs --label driver-580 --since 7d`

    - `llmb runs -w pretrain_llama3.1 --status success --limit 0 --json`
    """
    found, total = selected.find(status or (), runs_only=True)
    print_output(jobs_document(found, total, "runs") if json else runs_table(found, total, read_step_times))


@app.command()
def result(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_run,
            help="Label, campaign, run folder, archive, id of a job, id of a run or its beginning, or 'latest'.",
        ),
    ],
    plot: Annotated[
        bool, typer.Option("--plot", help="Also plot the step times of the run, with the window underlined.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the result of a run that has ended, or of all runs with a label, in a campaign or in an archive.

    `latest` is the newest run that ended successfully. The exit code is that of the run, or of the worst run: 0
    success, 4 failed, 6 invalid.

    Examples:

    - `llmb result latest`

    - `llmb result 4711`

    - `llmb result kqxt --json`

    - `llmb result driver-580`

    - `llmb result latest --plot`
    """
    folders = run_folders(run, install_here(), say)
    if plot and (json or len(folders) > 1):
        raise UsageError(
            "--plot requires a single run and no --json", do="omit --plot, or select one run without --json"
        )
    if len(folders) == 1:
        ended = read_ended_run(folders[0])
        if plot:
            lines = step_chart(read_steps(ended.folder.steps), ended.result.window or ended.plan.window)
            print_output("".join(f"{line}\n" for line in [*lines, ""]) if lines else "no recorded steps to draw\n\n")
        print_result(ended, json=json, verbose=is_verbose(ctx))
    else:
        print_repeats(_by_recipe(folders), json=json)


def _by_recipe(folders: Iterable[RunFolder]) -> list[list[EndedRun]]:
    recipes: dict[str, list[EndedRun]] = {}
    problem: LlmbError | None = None
    for folder in folders:
        try:
            run = read_ended_run(folder)
        except (UsageError, EnvironmentProblem) as error:
            problem = error
            say(f"left out: {error}")
        else:
            recipes.setdefault(identity_of(run.record).key, []).append(run)
    if problem and not recipes:
        raise problem
    return list(recipes.values())


def print_repeats(recipes: Sequence[Sequence[EndedRun]], *, json: bool) -> None:
    """Print runs by recipe; then raise RunFailed or InvalidRun if a run was not successful."""
    rows = sweep_rows(recipes)
    if json:
        print_output({**repeats_document(recipes), "rows": rows})
    elif any(recipes):
        repeated = len(rows) < 2 or any(len(runs) > 1 for runs in recipes)
        print_output([*(repeats_tables(recipes) if repeated else ()), *([sweep_table(rows)] if len(rows) > 1 else ())])
        sys.stdout.write("".join(f"{sentence}\n" for sentence in fp8_sentences(recipes)))
        sys.stderr.write("'llmb result ID' prints one of them\n")
    runs = [run for one in recipes for run in one]
    failed = [run for run in runs if run.result.status in ("failed", "cancelled")]
    invalid = [run for run in runs if run.result.status == "invalid"]
    for kind, problem in ((failed, RunFailed), (invalid, InvalidRun)):
        if kind:
            what = f"{len(kind)} of {len(runs)} runs {'failed' if kind is failed else 'had invalid results'}"
            raise problem(what, where=str(kind[0].folder.log))


def print_result(run: EndedRun, *, json: bool, verbose: bool = False) -> None:
    """Print a run's result; then raise InvalidRun or RunFailed if the run was not successful."""
    if json:
        print_output(run_document(run))
    else:
        if run.result.status == "success":
            answer = answer_text(run.result, _verdict_of(run))
            steps = read_steps(run.folder.steps)
            table = run_table(run.plan, run.result, steps, answer=answer, brief=not verbose)
            if verbose:
                add_other_runs(table, run.result)
            print_output(table)
        if run.result.machine and run.result.machine.events:
            print_output(machine_table(run.result.machine))
        if run.result.status == "success":
            name = run.record.id
            if run.folder.path.resolve().is_relative_to(install_here().resolve()):
                more = "" if verbose else f"'llmb result {name} -v' has all figures, "
                sys.stderr.write(
                    f"run {name}; {more}'llmb judge {name}' has the verdict, 'llmb report {name}' a page\n"
                )
    raise_unless_successful(run)


def _verdict_of(run: EndedRun) -> Verdict | None:
    if run.result.verdict or run.result.flaw:
        return run.result.verdict or None
    install = install_here()
    found = find_runs(str(run.folder.path), install, lambda _: None).runs
    judged = judge_runs(found, Against(), install, lambda _: None) if found else []
    return judged[0].verdict if judged else None
