# SPDX-License-Identifier: Apache-2.0
"""``llmb trace``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from llmb.cli.json_option import Json
from llmb.report.output import print_json, print_tables
from llmb.report.trace_report import trace_document, trace_picture, trace_tables
from llmb.runs.folder import cannot_write, write_atomically
from llmb.traces.files import find_traces, read_traces
from llmb.traces.summary import summarize

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def trace(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Traces, or folders of runs that were profiled.", show_default=False),
    ],
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Also draw the steps, as an SVG file.")
    ] = None,
    json: Json = False,
) -> None:
    """The time of each training step by activity: matrix products, attention, communication, idle.

    Reads traces of the PyTorch profiler and SQLite exports of Nsight Systems, one file per rank. Every instant of a
    step is counted once, so the parts sum to the step time; overlapped communication is reported as hidden.
    In a trace without marked steps, iterations are those of the optimizer, or the whole is one step; a note says so.

    Examples:

    - `llmb trace torch_profile/rank-0.json.gz`

    - `llmb trace ~/.llmb/workloads/pretrain_llama3.1/experiments/NAME/NAME_SECONDS --picture steps.svg`

    - `llmb trace profile_0.sqlite profile_1.sqlite --json`
    """
    summary = summarize(read_traces(find_traces(paths), unmarked=True))
    if picture:
        try:
            write_atomically(picture, trace_picture(summary))
        except OSError as error:
            raise cannot_write(picture, error) from error
        sys.stderr.write(f"drawn in {picture}\n")
    if json:
        print_json(trace_document(summary))
        return
    print_tables(trace_tables(summary))
