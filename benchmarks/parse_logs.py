# SPDX-License-Identifier: Apache-2.0
"""Times ``llmb parse`` on many small logs beside a parser in shell; it has to be five times as fast."""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from llmb.readers.logs.step_line import format_step_line

STEPS = 50
PARSER = Path(__file__).parents[1] / "tests" / "support" / "reference_parser.sh"
"""Reads logs as the reference suite's parser does; ``--compat`` is compared with it in the tests."""
SHELL_FILES = 200
SHELL_TARGET = 5


@dataclass(frozen=True, slots=True)
class Result:
    files: int
    target: float
    ratio: float
    """The rate of parse divided by that of the shell."""
    seconds: float
    peak_mib: float
    """Resident memory of the parsing process."""


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="parse-logs-") as folder:
        result = _many_files(Path(folder, "many"), options.files, options.pairs)
    print(json.dumps(asdict(result), indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000, help="logs to create (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=5, help="timings of each, of which the median is reported (default: %(default)s)"
    )
    return parser.parse_args()


def _many_files(folder: Path, files: int, repeats: int) -> Result:
    for number in range(files):
        run = folder / f"pretrain_tiny_{number % 100}" / f"run_{number}"
        run.mkdir(parents=True)
        (run / f"log-pretrain_tiny_bf16_gpus8_{number}_0.out").write_bytes(_small_log(random.Random(number)))
    some = folder.with_name("some")
    for path in sorted(folder.rglob("*.out"))[:SHELL_FILES]:
        (some / path.parent.name).mkdir(parents=True)
        shutil.copy(path, some / path.parent.name)
    parse, shell = _parse_command(folder), ["bash", str(PARSER), str(some)]
    seconds, shell_seconds = _paired(parse, shell, repeats)
    ratio = (files / seconds) / (min(files, SHELL_FILES) / shell_seconds)
    return Result(files, SHELL_TARGET, ratio, seconds, _peak_mib(parse))


def _paired(parse: list[str], other: list[str], pairs: int) -> tuple[float, float]:
    """Medians of both, which alternate, so that they run under the same load of the machine."""
    timings = [(_seconds(parse), _seconds(other)) for _ in range(pairs)]
    own, others = zip(*timings, strict=True)
    return statistics.median(own), statistics.median(others)


def _parse_command(path: Path) -> list[str]:
    return [sys.executable, "-m", "llmb.cli.main", "parse", str(path), "--format", "json"]


def _seconds(command: list[str]) -> float:
    """Wall-clock time of a whole process. Raises CalledProcessError."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def _peak_mib(command: list[str]) -> float:
    """The kernel's high-water mark of a process, polled; getrusage would include the memory of this process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak_kib = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak_kib = max([peak_kib, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
        time.sleep(0.005)
    return peak_kib / 1024


def _step_line(step: int, steps: int, noise: random.Random) -> bytes:
    line = format_step_line(
        step=step,
        steps=steps,
        lr=4.491e-06,
        global_batch_size=256,
        peak_memory_bytes=72972500992,
        memory_allocated_bytes=34466545664,
        loss=12.81 - 0.001 * (step % 1000),
        step_time_s=noise.gauss(2.69, 0.02),
        tflops_per_gpu=610.3,
        consumed_samples=256 * (step + 1),
    )
    return line.encode() + b"\n"


def _small_log(noise: random.Random) -> bytes:
    """A run's log with the output of frameworks between the step lines: configuration, warnings, validation."""
    start = [b"[NeMo I 2025-06-01 10:00:%02d] setting %d of the trainer: %x\n" % (i % 60, i, i**5) for i in range(100)]
    middle = []
    for step in range(STEPS):
        middle.append(_step_line(step, STEPS, noise))
        middle.append(b"[NeMo W 2025-06-01 10:01:%02d] rank %d: slow data loader\n" % (step, noise.randrange(8)))
    end = [b"srun: job 4711 step 0: task %d: completed\n" % task for task in range(64)]
    return b"".join(start + middle + end)


if __name__ == "__main__":
    main()
