# SPDX-License-Identifier: Apache-2.0
"""``llmb nccl``."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from llmb.cli.json_option import Json
from llmb.errors import UsageError
from llmb.report.nccl_report import nccl_document, nccl_tables
from llmb.report.output import print_json, print_tables
from llmb.traces.nccl_log import EXPECTED, find_nccl_files, read_nccl_logs
from llmb.traces.nccl_summary import Codes, summarize_nccl
from llmb.traces.nccl_tests import read_test_tables

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def nccl(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Logs, or folders of runs with --nccl-trace.", show_default=False),
    ],
    json: Json = False,
) -> None:
    """Collectives in NCCL's logs, and bandwidths from the tables of nccl-tests.

    Logs of NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=COLL are read together, as those of one run. The result lists
    collectives with number of ranks, size and count, and the bytes of each step if steps are known. Tables of
    nccl-tests are recognized by their column headers; those of the same test in several files are compared.

    Examples:

    - `llmb nccl log-run.out`

    - `llmb nccl nccl_trace/rank-0.log nccl_trace/rank-1.log --json`

    - `llmb nccl all_reduce_before.txt all_reduce_after.txt`
    """
    files = find_nccl_files(paths)
    names = Counter(path.name for path in files)
    tests = [
        table
        for path in files
        for table in read_test_tables(path, source=path.name if names[path.name] == 1 else str(path))
    ]
    log = read_nccl_logs(files)
    if not log.calls and not tests:
        named = ", ".join(str(path) for path in files[:3]) + (", ..." if len(files) > 3 else "")
        raise UsageError(
            "no output of NCCL found",
            where=named,
            choices=EXPECTED,
            do="set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL, or use 'llmb run --nccl-trace'",
        )
    summary = summarize_nccl(log, Codes()) if log.calls else None
    if json:
        print_json(nccl_document(summary, tests))
        return
    print_tables(nccl_tables(summary, tests))
