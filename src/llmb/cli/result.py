# SPDX-License-Identifier: Apache-2.0
"""Prints how a run ended, the same for every command that waits for one."""

import sys

from llmb.launch.local_run import raise_unless_successful
from llmb.report.output import print_json, print_table
from llmb.report.run_report import run_document, run_table
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.result import Result


def print_result(folder: RunFolder, plan: Plan, result: Result, *, json: bool) -> None:
    """Raises InvalidRun or RunFailed where the run was no success."""
    if json:
        print_json(run_document(folder, plan, result))
    elif result.status == "success":
        print_table(run_table(plan, result))
        sys.stderr.write(f"kept in {folder.path}\n")
    raise_unless_successful(folder, result)
