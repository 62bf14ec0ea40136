# SPDX-License-Identifier: Apache-2.0
"""How reliably, and how soon after its last step, a run ends: ``llmb run`` with two processes, run by run.

Targets: every run ends with exit code 0, none later than 10 s after its last step, and no process is left running.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

TARGET_S = 10
LONGEST_RUN_S = 300
HUNG = "hung"
COMMAND = ("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "2", "--layers", "1")


@dataclass(frozen=True, slots=True)
class End:
    """How one run ended. ``after_last_step_s`` is None if no step was done."""

    exit_code: int | str
    seconds: float
    after_last_step_s: float | None
    talk: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="number of runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps per run (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    ends = [one_run(options.steps) for _ in range(options.runs)]
    document = summary(ends)
    if options.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(text(document))
    sys.exit(0 if document["clean"] == options.runs else 1)


def one_run(steps: int) -> End:
    """The time of the last step is that of its log line; a run has ended when no process of it is left to wait for."""
    with tempfile.TemporaryDirectory(prefix="clean-ends-") as install:
        environ = {**os.environ, "LLMB_INSTALL": install}
        command = [sys.executable, "-m", "llmb.cli.main", *COMMAND, "--steps", str(steps)]
        began = time.time()
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, talk = process.communicate(timeout=LONGEST_RUN_S)
            exit_code: int | str = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()  # it then ends its workers
            _, talk = process.communicate()
            exit_code = HUNG
        ended = time.time()
        written = [path.stat().st_mtime for path in Path(install).rglob("metrics.jsonl")]
        return End(exit_code, ended - began, ended - written[0] if written else None, talk[-2000:])


def summary(ends: list[End]) -> dict[str, object]:
    after = [end.after_last_step_s for end in ends if end.after_last_step_s is not None]
    return {
        "runs": len(ends),
        "clean": sum(end.exit_code == 0 for end in ends),
        "exit_codes": dict(Counter(str(end.exit_code) for end in ends)),
        "run_s": {"median": statistics.median(end.seconds for end in ends), "max": max(end.seconds for end in ends)},
        "after_last_step_s": {"median": statistics.median(after), "max": max(after)} if after else None,
        "after_last_step_target_s": TARGET_S,
        "failures": [asdict(end) for end in ends if end.exit_code != 0],
    }


def text(document: dict[str, object]) -> str:
    lines = [f"{document['clean']} of {document['runs']} runs ended with exit code 0"]
    for name, label in (("run_s", "whole run, s"), ("after_last_step_s", "end after the last step, s")):
        figures = document[name]
        if isinstance(figures, dict):
            lines.append(f"{label}: median {figures['median']:.2f}, slowest {figures['max']:.2f}")
    failures = document["failures"]
    assert isinstance(failures, list)
    lines += [f"exit code {failure['exit_code']}: {failure['talk']}" for failure in failures]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
