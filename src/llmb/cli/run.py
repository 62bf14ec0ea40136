# SPDX-License-Identifier: Apache-2.0
"""``llmb run``: one or several runs on this machine."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import typer

from llmb.base.errors import EnvironmentProblem, InvalidRun, RunFailed, UsageError, UserInterrupt
from llmb.base.options import RANKS, Option, arguments_of, build, convert, numbers_of, options_of, parse_ranges
from llmb.catalogue.records import OPEN_CHOICES
from llmb.catalogue.resolve import ModelRequest, Request
from llmb.cli.common import Force, Json, is_verbose
from llmb.cli.progress import RunProgress
from llmb.cli.root import install_here, print_unspecified, say, warn
from llmb.cli.runs import print_repeats, print_result
from llmb.cli.shared_options import catalogue_for, request_of, selection_options, takes, value_options
from llmb.jobs.local_run import LocalRun, Turn, earlier_runs, interleaved, plan_here, remaining, runs_lock
from llmb.launch.jobspec.job_options import FrameworkChoices, framework_arguments, framework_options
from llmb.launch.programs.conclude import EndedRun
from llmb.launch.programs.engine.program import check_memory, memory_warnings
from llmb.launch.started_ranks import join_run, started_rank
from llmb.reports.junit import run_cases, write_junit
from llmb.reports.output import print_output
from llmb.reports.plan_report import plan_document, plan_table, start_lines
from llmb.reports.sweep_report import titles_of
from llmb.reports.table import plain_lines
from llmb.runs.choices import Choices
from llmb.runs.plan import scale_warnings

REQUEST = selection_options(options_of(ModelRequest).values(), swept=True)
CHOICES = value_options(options_of(Choices).values(), swept=True)
FRAMEWORK = value_options([options_of(FrameworkChoices)[name] for name in ("framework", "framework_arg")])
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class Pretended:
    """Options for ranks that run alone, as if they belonged to a larger run."""

    pretend_scale: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            hidden=True,
            help="Run single ranks of a run on N GPUs, to measure compute time and memory. Collectives only copy local "
            "data, so there is no step time, throughput or loss.",
        ),
    ] = None
    rank: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS", hidden=True, help="With --pretend-scale: ranks to run in turn, such as 0,64. Default: 0."
        ),
    ] = None

    def ranks_of(self, request: ModelRequest) -> tuple[ModelRequest, Sequence[int | None]]:
        """Return the request at the pretended scale, and the ranks to run alone; None stands for all ranks.

        Raise UsageError for a rank outside the layout, and for options that contradict each other.
        """
        scale = self.pretend_scale
        if scale is None:
            if self.rank is not None:
                raise UsageError("--rank requires --pretend-scale", do="add --pretend-scale, or omit --rank")
            return request, [None]
        if request.scale not in (None, scale):
            raise UsageError(f"--scale is {request.scale}, but --pretend-scale is {scale}", do="omit --scale")
        text = self.rank or "0"
        try:
            spans = parse_ranges(text)
        except ValueError as error:
            do = "pass numbers from 0, and the lower end of a range first"
            raise UsageError(f"--rank is '{text}'; it must be {RANKS.valid}", do=do) from error
        if any(span.last >= scale for span in spans):
            raise UsageError(f"--rank is {text}; the layout has ranks 0 to {scale - 1}", do="pass some of these ranks")
        return replace(request, scale=scale), list(dict.fromkeys(numbers_of(spans)))


@dataclass(frozen=True, slots=True)
class Several:
    """Options for several runs, and for --dry-run."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print plan and command, or the order of runs.")] = False
    repeats: Annotated[
        int, typer.Option("-r", "--repeats", min=1, help="Number of runs of each recipe.", rich_help_panel="Selection")
    ] = 1
    start_new: Annotated[bool, typer.Option("--new", help="In a series with --label: repeat all runs.")] = False


@app.command()
@takes(REQUEST, CHOICES, FRAMEWORK, Pretended, Several)
def run(
    requested: dict[str, Any],
    chosen: dict[str, Any],
    program: dict[str, Any],
    pretended: Pretended,
    several: Several,
    force: Force = False,
    json: Json = False,
    *,
    ctx: typer.Context,
) -> None:
    """Train on this machine, now, with a progress bar, and print the result.

    With `--repeats`, or several values of an option (`--mbs 1,2,4`), several runs are made in turn and compared.
    With `--label`, the same command resumes an interrupted series.

    Results are saved below $LLMB_INSTALL (default ~/.llmb): the log, every step in metrics.jsonl, and run.json with
    the complete settings of the run.

    Examples:

    - `llmb run -w pretrain_llama3.1 -s tiny`

    - `llmb run -w pretrain_nemotron4 -s tiny --scale 2 --steps 20 --json`

    - `llmb run --model-config config.json --scale 1 --gpu-type h100 --dry-run`

    - `llmb run -w pretrain_llama3.1 -s tiny --profile --save-checkpoint`

    - `llmb run -w pretrain_llama3.1 -s tiny --dtype fp32,bf16 --repeats 5 --label before`

    - `llmb run -w pretrain_llama3.1 -s tiny --mbs 1,2 --scale 1,2`

    - `llmb run -w pretrain_llama3.1 -s 405b --pretend-scale 512 --rank 0,448`
    """
    started, framework = started_rank(os.environ), framework_options(build(FrameworkChoices, program))
    if started and started.rank:
        if not several.dry_run:
            join_run(started, os.environ)
        return
    if several.start_new and chosen["label"] is None:
        raise UsageError("--new has no effect without --label: every run is new", do="omit --new, or add --label")
    install, asked = install_here(), []
    combinations = list(combined({**requested, **chosen}))
    catalogue = catalogue_for(request_of(combinations[0]))
    for one in combinations:
        request, choices = request_of(one), build(Choices, one)
        request, ranks = pretended.ranks_of(request)
        asked += [(request, choices, alone) for alone in ranks]
    if len(asked) * several.repeats > 1:
        if started:
            what = f"{started.world_size} ranks were started for one run, but these options select several"
            raise UsageError(what, do="pass one value per option, without --repeats; start the ranks once per run")
        locals_ = [plan_here(catalogue, one, own, os.environ, install, alone, framework) for one, own, alone in asked]
        repeats = [several.repeats] * len(asked)
        run_or_print(locals_, repeats, dry_run=several.dry_run, start_new=several.start_new, json=json)
        return
    ((request, choices, alone),) = asked
    local = plan_here(catalogue, request, choices, os.environ, install, alone, framework)
    if several.dry_run:
        warn((*([local.missing.warning] if local.missing else []), *memory_warnings(local.plan)))
        _print_plan(local, _same_run(request, choices, local), json=json)
        return
    _run_one(local, ctx, force=force, json=json)


def _run_one(local: LocalRun, ctx: typer.Context, *, force: bool, json: bool) -> None:
    plan = local.plan
    local.check()
    check_memory(plan, say, force=force)
    say(*_before(local))
    if is_verbose(ctx):
        for line in plain_lines(plan_table(plan, (), {})):
            sys.stderr.write(f"{line}\n")
    with RunProgress(plan.steps, plan.first_step) as progress:
        ended = local.start(progress.step, say)
    if ended.result.untried:
        say(f"warning: {ended.result.untried}")
    print_result(ended, json=json, verbose=is_verbose(ctx))


def _same_run(request: Request, choices: Choices, local: LocalRun) -> str:
    """Return a shell command that repeats the run, with the defaults of ``OPEN_CHOICES`` specified as options."""
    plan, rank = local.plan, []
    pinned = replace(request, **{name: getattr(plan.recipe, name) for name in OPEN_CHOICES})
    if plan.recipe.pretended_rank is not None:
        rank = ["--pretend-scale", str(plan.recipe.scale), "--rank", str(plan.recipe.pretended_rank)]
        pinned = replace(pinned, scale=None)
    program = framework_arguments(local.framework)
    return shlex.join(["llmb", "run", *arguments_of(pinned), *arguments_of(choices), *rank, *program])


def _print_plan(local: LocalRun, same: str, *, json: bool) -> None:
    plan, (command, variables) = local.plan, local.sample()
    if json:
        print_output(plan_document(plan, same, command, variables))
    else:
        print_unspecified(plan.recipe.unspecified)
        print_output(plan_table(plan, command, variables))
        print_output(f"\nThe same run, with everything specified:\n{same}\n")


def combined(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the values of options for each run: all combinations of values separated by commas.
    Raise UsageError for a list with an empty or a duplicate value, and for an invalid value."""
    options = {**options_of(ModelRequest), **options_of(Choices)}
    texts = {name: value for name, value in values.items() if options[name].swept and isinstance(value, str)}
    lists = [_values(options[name], text) for name, text in texts.items()]
    for combination in product(*lists):
        yield {**values, **dict(zip(texts, combination, strict=True))}


def _values(option: Option, text: str) -> list[Any]:
    items = [item.strip() for item in text.split(",")]
    if len(items) > 1 and (not all(items) or len(set(items)) < len(items)):
        what = f"{option.spelled} is '{text}'; it must be values separated by commas, without repetition"
        raise UsageError(what)
    unlimited = replace(option, minimum=None, above=None)  # limits are checked later, with all other problems
    named = get_origin(option.type) is Literal
    return [convert(unlimited, option.spelled, [item.lower() if named else item]) for item in items]


def run_or_print(
    locals_: Sequence[LocalRun],
    repeats: Sequence[int],
    *,
    dry_run: bool,
    start_new: bool,
    json: bool,
    junit: Path | None = None,
    left_out: Sequence[str] = (),
) -> None:
    """Run several plans and print the results or, with --dry-run, print their order; raise the errors of the runs."""
    if dry_run:
        print_order(locals_, repeats, start_new=start_new, json=json)
        return
    ended = run_several(locals_, repeats, start_new=start_new, json=json)
    write_junit(junit, "bulk", lambda: run_cases(ended, left_out))
    print_repeats(ended, json=json)


def run_several(
    locals_: Sequence[LocalRun], repeats: Sequence[int], *, start_new: bool, json: bool
) -> Sequence[Sequence[EndedRun]]:
    """Run all recipes in turn, each as often as ``repeats`` lists; if an error stops this, print the runs that ended.

    With a label, successful runs of an earlier call count, unless ``start_new``. Other series in this install root wait
    until these runs have ended.
    """
    for local in locals_:
        local.check()
    warn(warning for local in locals_ for warning in memory_warnings(local.plan))
    say(*dict.fromkeys(line for local in locals_ for line in _before(local)))
    titles = titles_of([local.plan for local in locals_])
    with runs_lock(locals_[0].install, say):
        ended, turns = _turns(locals_, repeats, start_new=start_new)
        try:
            for count, turn in enumerate(turns, start=1):
                local = locals_[turn.recipe]
                title, repeat = titles[turn.recipe], f"repeat {turn.repeat} of {repeats[turn.recipe]}"
                one = f"run {count} of {len(turns)}: {title}, {repeat}"
                say(f"{repeat}: {title}" if len(locals_) == 1 else one)
                ended[turn.recipe].append(_run_repeat(local))
        except UserInterrupt as error:
            _print_ended(ended, json=json)
            left, label = sum(repeats) - sum(map(len, ended)), locals_[0].label
            do = f"run the same command for the remaining {left}" if label else "add --label to make it resumable"
            raise UserInterrupt(error.what, where=error.where, do=do) from error
        except EnvironmentProblem:
            _print_ended(ended, json=json)
            raise
    return ended


def _turns(
    locals_: Sequence[LocalRun], repeats: Sequence[int], *, start_new: bool
) -> tuple[list[list[EndedRun]], list[Turn]]:
    ended: list[list[EndedRun]] = []
    titles = titles_of([local.plan for local in locals_])
    for local, title, count in zip(locals_, titles, repeats, strict=True):
        runs = [] if start_new else earlier_runs(local, say)[:count]
        if runs:
            ids = ", ".join(run.record.id for run in runs)
            say(f"{title}: {len(runs)} of {count} have already run ({ids}); --new repeats them")
        ended.append(runs)
    done = {number: len(runs) for number, runs in enumerate(ended)}
    return ended, remaining(interleaved(repeats), done)


def print_order(locals_: Sequence[LocalRun], repeats: Sequence[int], *, start_new: bool, json: bool) -> None:
    """Print the runs that ``run_several`` would start, in order."""
    _, turns = _turns(locals_, repeats, start_new=start_new)
    if json:
        print_output(
            {"runs": [{"title": locals_[one.recipe].plan.recipe.title(), "repeat": one.repeat} for one in turns]}
        )
        return
    for local in locals_:
        if local.missing:
            say(f"warning: {local.missing.warning}")
    titles = titles_of([local.plan for local in locals_])
    order = [f"{titles[turn.recipe]}, repeat {turn.repeat} of {repeats[turn.recipe]}" for turn in turns]
    print_output("".join(f"{line}\n" for line in order or ["nothing: all have already run"]))


def _before(local: LocalRun) -> Iterator[str]:
    yield from start_lines(local.plan)
    yield from (f"warning: {warning}" for warning in scale_warnings(local.plan))
    if local.plan.profile and local.plan.profile.reason:
        yield local.plan.profile.reason
    yield from local.beside()


def _run_repeat(local: LocalRun) -> EndedRun:
    with RunProgress(local.plan.steps, local.plan.first_step) as progress:
        ended = local.start(progress.step, say)
    if ended.result.status != "success":
        say(f"run {ended.record.id} did not succeed: {ended.result.reason}; see {ended.folder.log}")
    return ended


def _print_ended(ended: Sequence[Sequence[EndedRun]], *, json: bool) -> None:
    """Print the runs that ended before an error; do not raise their errors, because that error is raised next."""
    with suppress(RunFailed, InvalidRun):
        print_repeats(ended, json=json)
