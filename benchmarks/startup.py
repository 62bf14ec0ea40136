# SPDX-License-Identifier: Apache-2.0
"""Start-up time of commands, as whole processes, alternating with 'llmb --help' and a bare interpreter.

Compare processor times: unlike wall-clock time, they barely depend on other load on the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from llmb.jobs.history import open_history
from llmb.jobs.job import Job

BARE = "python -c pass"
HELP = "llmb --help"
HISTORY_JOBS = 20
REFERENCE_LAUNCHER_S = 0.26
"""The reference suite's llmb-run --help, on the machine where llmb was first measured."""


class Taken(NamedTuple):
    """Seconds of one process."""

    wall_s: float
    cpu_s: float
    """In user and in kernel mode."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timings of each command (default: 15)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_history(Path(folder))
        taken = measure(commands(), options.rounds, environment(Path(folder)))
    document = {name: summary(times, taken[HELP]) for name, times in taken.items()}
    if options.json:
        whole = {"start_up": document, "reference_launcher_s": REFERENCE_LAUNCHER_S}
        sys.stdout.write(json.dumps(whole, indent=2) + "\n")
        return
    sys.stdout.write(f"{'command':<64}{'median s':>10}{'min s':>8}{'CPU s':>8}{'x --help':>10}{'x bare':>8}\n")
    for name, row in document.items():
        bare = row["median_cpu_s"] / document[BARE]["median_cpu_s"]
        sys.stdout.write(
            f"{name:<64}{row['median_s']:>10.3f}{row['min_s']:>8.3f}{row['median_cpu_s']:>8.3f}"
            f"{row['cpu_beside_help']:>10.2f}{bare:>8.1f}\n"
        )
    sys.stdout.write(f"{'reference suite, llmb-run --help (elsewhere)':<66}{REFERENCE_LAUNCHER_S:>8.3f}\n")


def summary(times: list[Taken], beside: list[Taken]) -> dict[str, float]:
    """``cpu_beside_help`` is the median over the rounds of the ratio within one."""
    walls = [item.wall_s for item in times]
    return {
        "median_s": statistics.median(walls),
        "min_s": min(walls),
        "max_s": max(walls),
        "median_cpu_s": statistics.median(item.cpu_s for item in times),
        "cpu_beside_help": statistics.median(a.cpu_s / b.cpu_s for a, b in zip(times, beside, strict=True)),
    }


def commands() -> dict[str, list[str]]:
    llmb = str(Path(sys.executable).with_name("llmb"))
    predict = "predict pretrain_llama3.1 70b --scale 64 --gpu-type h100"
    called = ("--help", "list", "show -w pretrain_llama3.1 -s 8b", predict, "jobs list")
    return {BARE: [sys.executable, "-c", "pass"], **{f"llmb {rest}": [llmb, *rest.split()] for rest in called}}


def make_history(install: Path) -> None:
    """Jobs that have ended, so that a list of them needs no call of Slurm."""
    (install / "cluster_config.yaml").touch()
    jobs = [
        Job(
            key=str(number),
            scheduler="slurm",
            job_id=str(number),
            run_dir=str(install / f"experiment_{number}" / "experiment"),
            experiment="experiment",
            workload="pretrain_llama3.1",
            size="8b",
            dtype="bf16",
            gpu_type="h100",
            scale=8,
            submitted_s=time.time(),
            state="COMPLETED",
            status="success",
        )
        for number in range(HISTORY_JOBS)
    ]
    with open_history(install, print) as store:
        store.add(jobs)


def environment(install: Path) -> dict[str, str]:
    """The environment of a user: compiled modules are cached, which some containers and test runners disable."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "LLMB_INSTALL": str(install)}


def measure(chosen: dict[str, list[str]], rounds: int, variables: dict[str, str]) -> dict[str, list[Taken]]:
    """The commands alternate, so that other load on the machine affects all of them; the first round is not counted."""
    found: dict[str, list[Taken]] = {name: [] for name in chosen}
    for _ in range(rounds + 1):
        for name, command in chosen.items():
            found[name].append(run(command, variables))
    return {name: times[1:] for name, times in found.items()}


def run(command: list[str], variables: dict[str, str]) -> Taken:
    """Raises CalledProcessError for a command that fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Taken(wall_s, used.ru_utime + used.ru_stime)


if __name__ == "__main__":
    main()
