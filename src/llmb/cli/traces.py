# SPDX-License-Identifier: Apache-2.0
"""``llmb trace`` and ``llmb nccl``: summaries of profiler traces, NCCL's logs, and results of nccl-tests."""

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from llmb.base.errors import UsageError
from llmb.cli.common import Json
from llmb.cli.progress import PhaseProgress
from llmb.cli.root import run_paths, write_named
from llmb.readers.nccl.nccl_log import EXPECTED, describe_unread, find_nccl_files, read_lines, read_nccl_logs
from llmb.readers.nccl.nccl_network import read_network, source_of
from llmb.readers.nccl.nccl_summary import Codes, summarize_nccl
from llmb.readers.nccl.nccl_tests import read_test_tables
from llmb.readers.profiles.breakdown import summarize
from llmb.readers.profiles.trace_files import find_traces, read_traces
from llmb.reports.output import print_output
from llmb.reports.trace_report import nccl_document, nccl_tables, trace_document, trace_picture, trace_tables

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def trace(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Traces, or runs by folder, id or label.")],
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Also draw the steps in this SVG file.")
    ] = None,
    json: Json = False,
) -> None:
    """Break down the time of each training step into matrix products, attention, communication and idle time.

    The command reads traces of the PyTorch profiler and SQLite exports of Nsight Systems, one file per rank. Every
    instant of a step is counted once, so the parts sum to the step time; overlapped communication is reported as
    hidden. If steps are not marked, the trace is split at optimizer steps or shown as a whole, with a note.

    Examples:

    - `llmb trace torch_profile/rank-0.json.gz`

    - `llmb trace latest --picture steps.svg`

    - `llmb trace profile_0.sqlite profile_1.sqlite --json`
    """
    with PhaseProgress("reading"):
        summary = summarize(read_traces(find_traces(run_paths(paths)), unmarked=True))
    if picture:
        write_named(picture, trace_picture(summary), "--picture")
        sys.stderr.write(f"drawn in {picture}\n")
    print_output(trace_document(summary) if json else trace_tables(summary))


@app.command()
def nccl(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Logs of NCCL or nccl-tests, or runs.")],
    json: Json = False,
) -> None:
    """Show the network and the collectives in NCCL's logs, and bandwidths of nccl-tests.

    All logs (NCCL_DEBUG=INFO) are treated as one run's. Logs with NCCL_DEBUG_SUBSYS=INIT,NET show the network that
    NCCL used. Logs with COLL show the collectives with number of ranks, size and count, and the bytes per step if the
    steps are known. Runs on several nodes have INIT,NET logs in their folders. Tables and JSON of nccl-tests are
    recognized by their content; several files with the same test are compared.

    Examples:

    - `llmb nccl log-run.out`

    - `llmb nccl nccl_trace/rank-0.log nccl_trace/rank-1.log --json`

    - `llmb nccl all_reduce_before.txt all_reduce_after.txt`
    """
    files = find_nccl_files(run_paths(paths))
    names = Counter(path.name for path in files)
    tests = [
        table
        for path in files
        for table in read_test_tables(path, source=path.name if names[path.name] == 1 else str(path))
    ]
    log, source = read_nccl_logs(files), source_of([str(path) for path in files])
    network = read_network((text for path in files for text in read_lines(path)), source) or None
    if not log.calls and not tests and network is None:
        named = ", ".join(str(path) for path in files[:3]) + (", ..." if len(files) > 3 else "")
        unread = describe_unread(files)
        raise UsageError(
            f"no readable NCCL output: {unread}" if unread else "no NCCL output found",
            where=named,
            choices=EXPECTED,
            do="set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,COLL, or use 'llmb run --nccl-trace'",
        )
    summary = summarize_nccl(log, Codes()) if log.calls else None
    show = nccl_document if json else nccl_tables
    print_output(show(summary, tests, network))
