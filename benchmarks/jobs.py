# SPDX-License-Identifier: Apache-2.0
"""The time of ``llmb jobs`` with a long history, and its number of calls of Slurm.

Slurm's commands are stand-ins that answer for every job and record each call: only llmb is measured. The tests check
how Slurm's real output is parsed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmb.jobs.history import open_history
from llmb.jobs.job import Job

LIMIT_S = 0.5
MOST_CALLS = 5
WORKLOAD = "pretrain_llama3.1"
STAND_IN = """#!/bin/sh
echo "$(basename "$0")" >> {calls}
case "$(basename "$0")" in
squeue)
    while [ "$1" != -j ]; do shift; done
    echo "$2" | tr , '\\n' | awk '$1 % 10 {{ print $1 "|RUNNING|0|0|None|node1|1|2|3||" }}' ;;
sacct)
    while [ "$1" != -j ]; do shift; done
    echo "$2" | tr , '\\n' | awk '{{ print $1 "|COMPLETED|0:0|node1|None|1|2|3|" }}' ;;
esac
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", type=int, default=10_000, help="jobs in the history (default: 10,000)")
    parser.add_argument("--live", type=int, default=1_000, help="jobs of these that have not ended (default: 1,000)")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each command (default: 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        document = measure(Path(folder), options.history, options.live, options.rounds)
    if options.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    sys.stdout.write(f"{options.history:,} jobs in the history, {options.live:,} of them live\n")
    for name, value in document.items():
        sys.stdout.write(f"{name:<44}{value:>10.3f}\n")


def measure(root: Path, history: int, live: int, rounds: int) -> dict[str, float]:
    """Seconds and counts by name; ends the program if one is above its limit."""
    environ = stand_ins(root)
    fill(root, history, live)
    cases = {
        "a bare interpreter": [],
        "jobs list, as known": ["jobs", "list", "--no-refresh"],
        "jobs list --json, as known": ["jobs", "list", "--no-refresh", "--json"],
        "jobs list --limit 0 --json, as known": ["jobs", "list", "--no-refresh", "--limit", "0", "--json"],
    }
    document = {}
    for name, arguments in cases.items():
        document[f"{name}: s"], document[f"{name}: CPU s"] = timed(arguments, environ, rounds)
    calls = root / "calls"
    document["jobs refresh: s"], document["jobs refresh: CPU s"] = timed(["jobs", "refresh", "--json"], environ, 1)
    document["jobs refresh: calls of Slurm"] = len(calls.read_text().split())
    # A busy machine increases wall-clock time, but not CPU time.
    if document["jobs list, as known: CPU s"] > LIMIT_S or document["jobs refresh: calls of Slurm"] > MOST_CALLS:
        sys.exit(f"above a limit: {document}")
    return document


def stand_ins(root: Path) -> dict[str, str]:
    """The environment of a shell in which Slurm's commands are stand-ins."""
    folder = root / "bin"
    folder.mkdir()
    for name in ("squeue", "sacct", "scontrol", "scancel", "sbatch"):
        (folder / name).write_text(STAND_IN.format(calls=root / "calls"))
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "LLMB_INSTALL": str(root)}


def fill(root: Path, history: int, live: int) -> None:
    with open_history(root, sys.exit) as store:
        store.add(job(root, number, live=number >= history - live) for number in range(history))


def job(root: Path, number: int, *, live: bool) -> Job:
    experiment = "pretrain_llama3.1_70b_bf16_gpus64_tp4_pp4_cp2_vp5_ep1_mbs1_gbs128"
    run_dir = root / "workloads" / WORKLOAD / "experiments" / experiment / f"{experiment}_{number}" / experiment
    return Job(
        scheduler="slurm",
        key=f"key-{number}",
        job_id=str(100_000 + number),
        run_dir=str(run_dir),
        experiment=experiment,
        workload=WORKLOAD,
        size="70b",
        dtype="bf16",
        gpu_type="h100",
        scale=64,
        submitted_s=float(number),
        state="RUNNING" if live else "COMPLETED",
        status="running" if live else "success",
        nodes="node[1-8]",
        ended_s=None if live else number + 1.0,
        step_time_s=None if live else 4.2,
    )


def timed(arguments: list[str], environ: dict[str, str], rounds: int) -> tuple[float, float]:
    """Median wall-clock and CPU seconds of the whole process."""
    times, processor = [], []
    for _ in range(rounds):
        began, used = time.perf_counter(), used_s()
        llmb(arguments, environ)
        times.append(time.perf_counter() - began)
        processor.append(used_s() - used)
    return statistics.median(times), statistics.median(processor)


def used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def llmb(arguments: list[str], environ: dict[str, str]) -> None:
    command = ["-m", "llmb.cli.main", *arguments] if arguments else ["-c", "pass"]
    subprocess.run([sys.executable, *command], env=environ, check=True, capture_output=True)


if __name__ == "__main__":
    main()
