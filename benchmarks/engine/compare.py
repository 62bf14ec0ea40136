# SPDX-License-Identifier: Apache-2.0
"""The comparison: kernels first, then all cases, until everything is done or the budget is used up."""

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.engine.budget import Budget, Clock
from benchmarks.engine.cases import Subject, find_subject, plan_cases
from benchmarks.engine.kernels import with_kernels, with_shares
from benchmarks.engine.machine import describe_machine, gpu_state
from benchmarks.engine.options import Options, read_options
from benchmarks.engine.records import CaseResult, Document, Published, Settings
from benchmarks.engine.run_case import blank, run_case
from benchmarks.engine.store import is_done, open_document, save, with_case
from benchmarks.engine.tables import tables
from benchmarks.engine.verdicts import judge
from llmb.catalogue.load import Catalogue
from llmb.errors import LlmbError, UsageError
from llmb.site.machine import Machine, this_machine

NOTHING_DONE = 4
INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    machine = this_machine()
    options = read_options(arguments, has_gpu=bool(machine.gpu_names))
    clock = Clock(options.budget_s, time.monotonic())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM is cleaned up after, too
    try:
        document = compare(options, machine, clock)
    except LlmbError as error:
        sys.stderr.write(f"{error.text()}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; completed results are in --out, if it was given\n")
        return INTERRUPTED
    if options.json:
        sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 190).print(tables(document))
    return 0 if any(case.status == "done" for case in document.cases) else NOTHING_DONE


def compare(options: Options, machine: Machine, clock: Clock) -> Document:
    subjects = find_subjects(options, machine)
    settings = settings_of(options, subjects, machine)
    document = open_document(options.out, settings, fresh=options.fresh)
    document = document.model_copy(
        update={
            "environment": {**describe_machine(), "started_unix_s": time.time()},
            "published": targets(document, subjects),
        }
    )
    with tempfile.TemporaryDirectory(prefix="compare-engines-") as temporary:
        folder = options.logs or Path(temporary)
        if options.ceilings:
            document = with_kernels(document, subjects, folder, clock)
            save(document, options.out)
        document = run_cases(document, options, subjects, folder, clock)
    environment = {**document.environment, "gpu_after": gpu_state()}
    cases = tuple(with_shares(case, document.ceilings) for case in document.cases)
    verdicts = tuple(judge(cases, document.published))
    document = document.model_copy(update={"environment": environment, "cases": cases, "verdicts": verdicts})
    save(document, options.out)
    return document


def find_subjects(options: Options, machine: Machine) -> list[Subject]:
    catalogue = Catalogue()
    return [
        find_subject(
            catalogue, name, dtype, machine, gpu_type=options.gpu_type, tiny=options.tiny,
            micro_batches=options.micro_batches,
        )
        for name in options.models
        for dtype in options.dtypes
    ]  # fmt: skip


def targets(document: Document, subjects: Sequence[Subject]) -> tuple[Published, ...]:
    """Including those of the document's models, which an earlier call may have run."""
    found = {(target.model, target.dtype): target for target in document.published}
    for subject in subjects:
        if subject.target:
            key = subject.name, subject.recipe.dtype
            found[key] = Published(model=key[0], dtype=key[1], **subject.target.model_dump())
    return tuple(found.values())


def settings_of(options: Options, subjects: Sequence[Subject], machine: Machine) -> Settings:
    if not subjects:
        raise UsageError("nothing to compare", do="see --help")
    return Settings(
        gpu_type=subjects[0].recipe.gpu_type,
        device=machine.gpu_names[0] if machine.gpu_names else "cpu",
        tiny=options.tiny,
        warmup_steps=options.warmup_steps,
        steps=options.steps,
        micro_batches=options.micro_batches,
        seed=options.seed,
        compiled=options.compiled,
        llmb_options=options.llmb_options,
    )


def run_cases(
    document: Document, options: Options, subjects: Sequence[Subject], folder: Path, clock: Clock
) -> Document:
    """The document with every case in it, saved after each."""
    cases = list(plan_cases(subjects, options.engines, options.rounds))
    budget = Budget(clock, document.settings)
    for number, case in enumerate(cases):
        label = f"{number + 1}/{len(cases)} {case.engine} {case.subject.label}"
        known = blank(case)
        if is_done(document, known):
            clock.say(f"{label}: reused")
            continue
        reason = budget.obstacle(case)
        if reason:
            result = known.model_copy(update={"reason": reason})
        else:
            result = run_case(case, document.settings, folder / f"case-{number}", clock.left_s)
            budget.learn(result)
        clock.say(f"{label}: {outcome(result)}")
        document = with_case(document, result)
        save(document, options.out)
    return document


def outcome(result: CaseResult) -> str:
    if result.status != "done":
        return f"{result.status.replace('_', ' ')}: {result.reason}"
    mfu = (result.mfu_pct or {}).get("full")
    assert result.step_time_s is not None
    rate = f"{result.step_time_s['median']:.4g} s per step, {result.tokens_per_s:,.0f} tokens/s"
    return rate if mfu is None else f"{rate}, MFU {mfu:.1f} % (full)"
