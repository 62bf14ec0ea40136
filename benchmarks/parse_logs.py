# SPDX-License-Identifier: Apache-2.0
"""Times ``llmb parse`` on many small logs, beside a parser in shell, and on large ones, beside grep on the same file.

Targets: 10,000 small logs 25 times as fast as the shell; of the rate of ``grep -c``, 0.33 in a log whose step lines are
far apart ("trace"), and 0.2 in one that has only step lines ("dense").
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llmb.logs.step_line import format_step_line

STEPS = 50
SHELL = r"""
find "$1" -name '*.out' | while read -r file; do
    grep -q 'train_step_timing in s:' "$file" || continue
    name=$(basename "$file" | sed 's/^[^.]*[.]//; s/_0[.]out$//')
    awk -v name="$name" '
        /train_step_timing in s:/ && match($0, /iteration [0-9]+/) {
            step = substr($0, RSTART + 10, RLENGTH - 10) + 0
            if (step < 35 || step > 44) next
            match($0, /train_step_timing in s: [0-9.]+/); time = substr($0, RSTART + 24, RLENGTH - 24)
            match($0, /TFLOPS_per_GPU: [0-9.e+]+/); rate = substr($0, RSTART + 16, RLENGTH - 16)
            n++; sum += time; squares += time * time; rates += rate
        }
        END { if (n) printf "%s %.3f %.3f %.2f\n", name, sum / n, sqrt(squares / n - (sum / n) ^ 2), rates / n }
    ' "$file"
done
"""
"""What the reference suite's parser does: for each file grep, its name by sed, and mean and deviation by awk."""
SHELL_FILES = 200
SHELL_TARGET = 25
GREP_TARGETS = {"trace": 0.33, "dense": 0.2}
NEEDLE = "train_step_timing in s"
NCCL_LINES_PER_STEP = 4000
NO_RESULT = 4
"""The exit code of ``llmb parse`` where no log gives a result: a traced run does not."""
COLUMNS = ("case", "beside", "target", "rate / its", "GB", "parse (s)", "GB/s", "peak (MiB)")


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    beside: str
    target: float
    ratio: float
    """The rate of parse divided by that of what runs beside it."""
    gigabytes: float
    seconds: float
    peak_mib: float
    """Resident memory of the parsing process."""


def main() -> None:
    options = _options()
    workdir = Path(tempfile.mkdtemp(prefix="parse-logs-", dir=options.workdir))
    size = int(options.size_gb * 1e9)
    try:
        results = [
            _many_files(workdir / "many", options.files, options.pairs),
            *_large_file("trace", workdir / "trace.out", _trace_log(size), options.pairs),
            *_large_file("dense", workdir / "dense.out", _dense_log(size), options.pairs),
        ]
    finally:
        shutil.rmtree(workdir)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _print_table(results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000, help="small logs to create (default: %(default)s)")
    parser.add_argument("--size-gb", type=float, default=1.0, help="size of the large logs (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=5, help="timings of each, of which the median is reported (default: %(default)s)"
    )
    parser.add_argument("--workdir", type=Path, help="where to create the files (default: the temporary directory)")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
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
    sizes = [path.stat().st_size for path in folder.rglob("*.out")]
    parse, shell = _parse_command(folder), ["sh", "-c", SHELL, "sh", str(some)]
    seconds, shell_seconds = _paired(parse, shell, repeats)
    ratio = (files / seconds) / (min(files, SHELL_FILES) / shell_seconds)
    case = f"{files} logs of {STEPS} steps"
    return Result(case, "shell", SHELL_TARGET, ratio, sum(sizes) / 1e9, seconds, _peak_mib(parse))


def _large_file(kind: str, path: Path, blocks: Iterable[bytes], pairs: int) -> list[Result]:
    with path.open("wb") as file:
        file.writelines(blocks)
    rules = ("reference", "auto", "last")
    results = [_against_grep(kind, path, rule, pairs) for rule in rules]
    path.unlink()
    return results


def _paired(parse: list[str], other: list[str], pairs: int) -> tuple[float, float]:
    """Medians of both, which alternate, so that they run under the same load of the machine."""
    timings = [(_seconds(parse), _seconds(other)) for _ in range(pairs)]
    own, others = zip(*timings, strict=True)
    return statistics.median(own), statistics.median(others)


def _against_grep(kind: str, path: Path, rule: str, pairs: int) -> Result:
    parse, grep = [*_parse_command(path), "--window", rule], ["grep", "-c", NEEDLE, str(path)]
    seconds, grep_seconds = _paired(parse, grep, pairs)
    case, ratio = f"one {kind} log, window {rule}", grep_seconds / seconds
    return Result(case, "grep -c", GREP_TARGETS[kind], ratio, path.stat().st_size / 1e9, seconds, _peak_mib(parse))


def _parse_command(path: Path) -> list[str]:
    return [sys.executable, "-m", "llmb.cli.main", "parse", str(path), "--format", "json"]


def _seconds(command: list[str]) -> float:
    """Wall-clock time of a whole process. Raises CalledProcessError for exit codes that a log with a trace has not."""
    start = time.perf_counter()
    process = subprocess.run(command, stdout=subprocess.PIPE)  # into /dev/null, grep would stop at the first match
    if process.returncode not in (0, NO_RESULT):
        raise subprocess.CalledProcessError(process.returncode, command)
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


def _trace_log(size: int) -> Iterator[bytes]:
    """A log with NCCL_DEBUG=INFO for collectives: thousands of NCCL lines between two steps."""
    noise = random.Random(1)
    block = b"".join(_nccl_line(count, noise) for count in range(NCCL_LINES_PER_STEP))
    steps = max(1, size // len(block))
    for step in range(steps):
        yield block
        yield _step_line(step, steps, noise)


def _nccl_line(count: int, noise: random.Random) -> bytes:
    send, receive, communicator = (noise.getrandbits(40) for _ in range(3))
    rank = count % 8
    return (
        f"node-{count % 64}:{4000 + rank}:{5000 + rank} [{rank}] NCCL INFO AllReduce: opCount {count:x}"
        f" sendbuff 0x7f{send:010x} recvbuff 0x7f{receive:010x} count {noise.randrange(1 << 24)} datatype 9 op 0 root 0"
        f" comm 0x55{communicator:010x} [nranks=128] stream 0x55{communicator + 64:010x}\n"
    ).encode()


def _dense_log(size: int) -> Iterator[bytes]:
    noise = random.Random(1)
    steps = max(1, size // len(_step_line(1_000_000, 1_000_000, noise)))
    return (_step_line(step, steps, noise) for step in range(steps))


def _print_table(results: list[Result]) -> None:
    table = Table(title="llmb parse, whole process, median", box=None)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("case", "beside") else "right")
    for result in results:
        rate = result.gigabytes / result.seconds
        figures = (result.target, result.ratio, result.gigabytes, result.seconds, rate, result.peak_mib)
        table.add_row(result.case, result.beside, *(f"{value:.3g}" for value in figures))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
