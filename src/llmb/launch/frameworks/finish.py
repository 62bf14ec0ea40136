# SPDX-License-Identifier: Apache-2.0
"""What the batch script of a framework calls last: ``RUN_FOLDER EXIT_CODE SIGNAL``; no signal is empty."""

import sys
from pathlib import Path

from llmb.launch.slurm.finish import CAUSES
from llmb.logs.files import parse_file
from llmb.runs.folder import RunFolder
from llmb.runs.record import now, read_record, write_record
from llmb.runs.result import Status


def finish_framework(folder: RunFolder, exit_code: int, signal: str = "") -> Status:
    """Judges the run by its log, and writes that into its record.

    A framework that has done every step may still fail while it cleans up: the run is a success then. Its steps are in
    the log alone, where ``llmb parse`` finds them.
    """
    record = read_record(folder)
    window = record.plan.window
    outcome = parse_file(folder.log, f"{window.first}-{window.last}").outcome
    status: Status = outcome.status if outcome.status in ("success", "invalid") else "failed"
    reasons = [outcome.reason] if status != "success" else []
    if exit_code:
        cause = CAUSES.get(signal, signal)
        reasons.append(f"ended by {cause}" if cause else f"exit code {exit_code}")
    ended = {"status": status, "reason": "; ".join(reasons) or None, "exit_code": exit_code, "ended_at": now()}
    write_record(folder, record.model_copy(update=ended))
    return status


if __name__ == "__main__":
    finish_framework(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
