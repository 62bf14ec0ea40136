# SPDX-License-Identifier: Apache-2.0
"""``llmb run`` with several runs: repeats, recipes in turn, or both."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from llmb.catalogue.resolve import Request
from llmb.cli.messages import say
from llmb.cli.progress import RunProgress
from llmb.errors import EnvironmentProblem, InvalidRun, RunFailed, UsageError, UserInterrupt
from llmb.jobs.local_run import LocalRun
from llmb.jobs.repeats import EndedRun, Turn, earlier_runs, interleaved, remaining, turn_of
from llmb.report.output import print_json, print_tables, print_text
from llmb.report.plan_report import start_lines
from llmb.report.run_report import repeats_document, repeats_tables
from llmb.runs.checkpoint_scales import scale_warnings
from llmb.runs.short_id import short_id

SWEPT = ("size", "dtype")
"""Fields of a request that may be lists, with commas between the names."""


def requests_of(request: Request) -> list[Request]:
    """One for each combination of the listed values. Raises UsageError for a list with an empty or a double name."""
    lists = [_names(name, getattr(request, name)) for name in SWEPT]
    changes: list[dict[str, Any]] = [dict(zip(SWEPT, values, strict=True)) for values in product(*lists)]
    return [replace(request, **change) for change in changes]


def _names(option: str, text: str | None) -> list[str | None]:
    if text is None or "," not in text:
        return [text]
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise UsageError(f"--{option} is '{text}'; it must be names separated by commas, each of them once")
    return list(names)


def run_several(locals_: Sequence[LocalRun], repeats: int, *, start_new: bool, json: bool) -> None:
    """Runs every recipe ``repeats`` times, in turn, and prints all that ended, also when it is interrupted.

    With a label, successful runs of an earlier call count, unless ``start_new``, and so do those that another client
    with that label makes meanwhile: the two take turns. Raises RunFailed or InvalidRun if one
    was not successful.
    """
    for local in locals_:
        local.check()
    for line in dict.fromkeys(line for local in locals_ for line in (*_before(local), *local.beside())):
        say(line)
    ended = [[] if start_new else earlier_runs(local, say)[:repeats] for local in locals_]
    for local, runs in zip(locals_, ended, strict=True):
        if runs:
            ids = ", ".join(short_id(run.folder.path) for run in runs)
            say(f"{local.plan.recipe.title()}: {len(runs)} of {repeats} were run before ({ids}); --new repeats them")
    turns = remaining(interleaved(len(locals_), repeats), {number: len(runs) for number, runs in enumerate(ended)})
    try:
        for number, turn in enumerate(turns, start=1):
            local, runs = locals_[turn.recipe], ended[turn.recipe]
            title, repeat = local.plan.recipe.title(), f"repeat {turn.repeat} of {repeats}"
            with turn_of(local, say):
                runs += [] if start_new else _made_meanwhile(local, runs, repeats)
                if len(runs) >= turn.repeat:
                    continue
                say(f"{repeat}: {title}" if len(locals_) == 1 else f"run {number} of {len(turns)}: {title}, {repeat}")
                runs.append(_run_one(local))
    except UserInterrupt as error:
        _print(ended, locals_, json=json)
        left = sum(repeats - len(runs) for runs in ended)
        do = f"the same command runs the {left} that are left" if locals_[0].label else "with --label it can be resumed"
        raise UserInterrupt(error.what, where=error.where, do=do) from error
    except EnvironmentProblem:
        _print(ended, locals_, json=json)
        raise
    _print(ended, locals_, json=json)
    _raise_unless_successful([run for runs in ended for run in runs])


def _made_meanwhile(local: LocalRun, known: Sequence[EndedRun], repeats: int) -> list[EndedRun]:
    """By another client, as far as they are still wanted."""
    folders = {run.folder.path for run in known}
    others = [run for run in earlier_runs(local, say) if run.folder.path not in folders]
    for run in others[: repeats - len(known)]:
        say(f"{short_id(run.folder.path)} was run by another client meanwhile, and counts")
    return others[: repeats - len(known)]


def print_order(locals_: Sequence[LocalRun], repeats: int, *, json: bool) -> None:
    """What ``run_several`` would run, in its order, without regard to earlier runs."""
    turns = list(interleaved(len(locals_), repeats))
    if json:
        print_json(
            {"runs": [{"title": locals_[one.recipe].plan.recipe.title(), "repeat": one.repeat} for one in turns]}
        )
        return
    for local in locals_:
        if local.missing:
            say(f"warning: {local.missing.warning}")
    print_text("".join(f"{_turn_text(locals_[turn.recipe], turn, repeats)}\n" for turn in turns))


def _before(local: LocalRun) -> Iterator[str]:
    yield from start_lines(local.plan)
    yield from (f"warning: {warning}" for warning in scale_warnings(local.plan))
    if local.plan.profile and local.plan.profile.reason:
        yield local.plan.profile.reason


def _turn_text(local: LocalRun, turn: Turn, repeats: int) -> str:
    return f"{local.plan.recipe.title()}, repeat {turn.repeat} of {repeats}"


def _run_one(local: LocalRun) -> EndedRun:
    with RunProgress(local.plan.steps, local.plan.first_step) as progress:
        folder, result = local.start(progress.step, say)
    if result.status != "success":
        say(f"run {short_id(folder.path)} is no success: {result.reason}; see {folder.log}")
    return EndedRun(folder, local.plan, result)


def _print(ended: Sequence[Sequence[EndedRun]], locals_: Sequence[LocalRun], *, json: bool) -> None:
    if json:
        print_json(repeats_document(ended, locals_[0].label))
    elif any(ended):
        print_tables(repeats_tables(ended))
        sys.stderr.write("'llmb result ID' prints one of them\n")


def _raise_unless_successful(runs: Sequence[EndedRun]) -> None:
    failed = [run for run in runs if run.result.status == "failed"]
    invalid = [run for run in runs if run.result.status == "invalid"]
    for kind, problem in ((failed, RunFailed), (invalid, InvalidRun)):
        if kind:
            what = f"{len(kind)} of {len(runs)} runs {'failed' if kind is failed else 'are invalid'}"
            raise problem(what, where=str(kind[0].folder.log))
