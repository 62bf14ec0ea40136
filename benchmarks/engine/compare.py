# SPDX-License-Identifier: Apache-2.0
"""The comparison: all cases in order, until everything is done or the budget is used up."""

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rich.console import Console, Group

from benchmarks.engine.budget import Clock
from benchmarks.engine.cases import Case, Subject, find_subject, plan_cases
from benchmarks.engine.machine import describe_machine, gpu_state, in_use, memory_bytes
from benchmarks.engine.options import Options, read_options
from benchmarks.engine.plan_table import plan_table
from benchmarks.engine.records import Document, Published, Settings
from benchmarks.engine.session import Session
from benchmarks.engine.store import locked, open_document, save
from benchmarks.engine.tables import tables
from benchmarks.engine.wheels import installed
from llmb.base.errors import LlmbError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype
from llmb.launch.site.site import Machine, this_machine

NOTHING_DONE = 4
INTERRUPTED = 130
WIDTH = 190
"""Of tables in a file."""


def main(arguments: Sequence[str]) -> int:
    machine = this_machine()
    options = read_options(arguments, has_gpu=bool(machine.gpu_names))
    clock = Clock(options.budget_s, time.monotonic())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM is cleaned up after, too
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        if options.plan:
            console.print(planned(options, machine))
            return 0
        with locked(options.out):
            document = compare(options, machine, clock)
            show(document, console, json=options.json)
            save(document, options.out)
    except LlmbError as error:
        sys.stderr.write(f"{error.text()}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{error}\ncompleted results are in --out, if it was given\n")
        return LlmbError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; completed results are in --out, if it was given\n")
        return INTERRUPTED
    return 0 if any(case.status == "done" for case in document.cases) else NOTHING_DONE


def prepared(options: Options, machine: Machine) -> tuple[list[Case], Document, float | None]:
    """What to run, what is known already, and the GPU's bytes of memory."""
    catalogue = Catalogue()
    cases = find_cases(options, machine, catalogue)
    document = start(options, cases, machine)
    return cases, document, gpu_memory_bytes(document, cases, catalogue)


def planned(options: Options, machine: Machine) -> Group:
    cases, document, gpu_memory = prepared(options, machine)
    here = options.gpu_type == "cpu" or bool(machine.gpu_names)
    return plan_table(cases, document, gpu_memory, here=here, ceilings=options.ceilings, budget_s=options.budget_s)


def show(document: Document, console: Console, *, json: bool) -> None:
    if json:
        sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    else:
        console.print(tables(document))


def find_cases(options: Options, machine: Machine, catalogue: Catalogue) -> list[Case]:
    @cache
    def subject_of(name: str, dtype: Dtype, micro_batches: int) -> Subject:
        return find_subject(
            catalogue, name, dtype, machine, gpu_type=options.gpu_type, tiny=options.tiny,
            micro_batches=options.micro_batches or micro_batches,
        )  # fmt: skip

    found: dict[tuple[object, ...], Case] = {}
    for case in plan_cases(options.groups, options.variants, subject_of):
        found.setdefault(case.key, case)
    return list(found.values())


def start(options: Options, cases: Sequence[Case], machine: Machine) -> Document:
    """The document to resume, or an empty one."""
    subjects = [case.subject for case in cases]
    settings = settings_of(options, subjects, machine)
    document = open_document(options.out, settings, fresh=options.fresh, earlier=options.resume)
    environment = {**describe_machine(), "started_unix_s": time.time()}
    return document.model_copy(update={"environment": environment, "published": targets(document, subjects)})


def gpu_memory_bytes(document: Document, cases: Sequence[Case], catalogue: Catalogue) -> float | None:
    """As the driver reports it, else as the catalogue has it; None without a GPU."""
    known = catalogue.gpus.get(cases[0].subject.recipe.gpu_type)
    reported = memory_bytes(document.environment["gpu_before"])
    return reported or (known.memory_gb * 2**30 if known else None)


def compare(options: Options, machine: Machine, clock: Clock) -> Document:
    cases, document, gpu_memory = prepared(options, machine)
    save(document, options.out)  # A place that cannot be written is known before anything is measured.
    if busy := in_use(document.environment["gpu_before"]):
        clock.say(busy)
    with tempfile.TemporaryDirectory(prefix="compare-engines-") as temporary:
        folder = options.logs or Path(temporary)
        session = Session(document, options.out, folder, clock, gpu_memory, options.retry_failed)
        session.run(cases, ceilings=options.ceilings)
    document = session.document
    environment = {**document.environment, "gpu_after": gpu_state()}
    return document.model_copy(update={"environment": environment})


def targets(document: Document, subjects: Sequence[Subject]) -> tuple[Published, ...]:
    """Including those of the document's models, which an earlier call may have run."""
    found = {(target.model, target.dtype): target for target in document.published}
    for subject in subjects:
        if subject.target:
            key = subject.name, subject.recipe.dtype
            found[key] = Published(model=key[0], dtype=key[1], **subject.target.model_dump())
    return tuple(found.values())


def settings_of(options: Options, subjects: Sequence[Subject], machine: Machine) -> Settings:
    return Settings(
        gpu_type=subjects[0].recipe.gpu_type,
        device=machine.gpu_names[0] if machine.gpu_names else "cpu",
        torch=installed("torch"),
        tiny=options.tiny,
        warmup_steps=options.warmup_steps,
        steps=options.steps,
        seed=options.seed,
        compiled=options.compiled,
        llmb_options=options.llmb_options,
        expandable_segments=options.expandable_segments,
    )
