# SPDX-License-Identifier: Apache-2.0
"""Start-up time of commands, as whole processes, alternating with a bare interpreter."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

BARE = "python -c pass"
REFERENCE_LAUNCHER_S = 0.26
"""The reference suite's llmb-run --help, on the machine where llmb was first measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timings of each command (default: 15)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    times = measure(commands(), options.rounds)
    if options.json:
        document = {
            name: {"median_s": statistics.median(t), "min_s": min(t), "max_s": max(t)} for name, t in times.items()
        }
        sys.stdout.write(
            json.dumps({"start_up": document, "reference_launcher_s": REFERENCE_LAUNCHER_S}, indent=2) + "\n"
        )
        return
    bare = statistics.median(times[BARE])
    sys.stdout.write(f"{'command':<58}{'median s':>10}{'min s':>8}{'max s':>8}{'x bare':>8}\n")
    for name, taken in times.items():
        median = statistics.median(taken)
        sys.stdout.write(f"{name:<58}{median:>10.3f}{min(taken):>8.3f}{max(taken):>8.3f}{median / bare:>8.1f}\n")
    sys.stdout.write(f"{'reference suite, llmb-run --help (elsewhere)':<58}{REFERENCE_LAUNCHER_S:>10.3f}\n")


def commands() -> dict[str, list[str]]:
    llmb = str(Path(sys.executable).with_name("llmb"))
    return {
        BARE: [sys.executable, "-c", "pass"],
        "llmb --help": [llmb, "--help"],
        "llmb list": [llmb, "list"],
        "llmb show -w pretrain_llama3.1 -s 8b": [llmb, "show", "-w", "pretrain_llama3.1", "-s", "8b"],
    }


def measure(chosen: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run; the commands alternate, so that other load on the machine affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for command in chosen.values():
        subprocess.run(command, check=True, capture_output=True)
    for _ in range(rounds):
        for name, command in chosen.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times[name].append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
