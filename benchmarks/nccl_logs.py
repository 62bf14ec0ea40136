# SPDX-License-Identifier: Apache-2.0
"""Times ``llmb nccl`` on a large NCCL debug log, alternating with grep on the same file.

Target, on two cores: a twentieth of the rate of ``grep -c`` or more, in less than 100 MiB.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llmb.readers.logs.step_line import format_step_line

NEEDLE = "NCCL INFO AllReduce"
RANKS, GROUP = 64, 8
LINES_PER_STEP = 40_000
SIZES = ("count 1 datatype 7", "count 4194304 datatype 9", "count 16777216 datatype 9", "count 218112000 datatype 7")
OPERATIONS = ("AllReduce", "AllGather", "ReduceScatter")
TARGET = 1 / 20


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    gigabytes: float
    seconds: float
    grep_seconds: float
    rate_over_grep: float
    """Bytes per second of llmb divided by those of grep."""
    peak_mib: float
    """Resident memory of the reading process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-gb", type=float, default=1.0, help="size of the log (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=3, help="timings of each, of which the median is reported (default: %(default)s)"
    )
    parser.add_argument("--workdir", type=Path, help="where to create the file (default: the temporary directory)")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
    options = parser.parse_args()
    workdir = Path(tempfile.mkdtemp(prefix="nccl-logs-", dir=options.workdir))
    try:
        path = workdir / "log.out"
        with path.open("wb") as file:
            file.writelines(_log(int(options.size_gb * 1e9)))
        result = _against_grep(path, options.pairs)
    finally:
        shutil.rmtree(workdir)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        _print_table(result)


def _log(size: int) -> Iterator[bytes]:
    """Collectives of ``RANKS`` ranks in two kinds of communicators, with occasional step lines."""
    noise = random.Random(1)
    handles = {(rank, kind): noise.getrandbits(36) for rank in range(RANKS) for kind in (0, 1)}
    block = b"".join(_line(number, handles, noise) for number in range(LINES_PER_STEP))
    steps = max(1, size // len(block))
    for step in range(steps):
        yield block
        line = format_step_line(
            step=step,
            steps=steps,
            lr=1e-4,
            global_batch_size=256,
            peak_memory_bytes=None,
            memory_allocated_bytes=None,
            loss=12.0,
            step_time_s=2.7,
            tflops_per_gpu=600.0,
            consumed_samples=256 * (step + 1),
        )
        yield line.encode() + b"\n"


def _line(number: int, handles: dict[tuple[int, int], int], noise: random.Random) -> bytes:
    rank, kind = number % RANKS, number // RANKS % 2
    send, receive, handle = noise.getrandbits(40), noise.getrandbits(40), handles[rank, kind]
    operation, size = OPERATIONS[number // RANKS % 3], SIZES[number // RANKS % len(SIZES)]
    return (
        f"node-{rank // 8}:{4000 + rank}:{5000 + rank} [{rank % 8}] NCCL INFO {operation}: opCount {number:x}"
        f" sendbuff 0x7f{send:010x} recvbuff 0x7f{receive:010x} {size} op 0 root 0"
        f" comm 0x55{handle:010x} [nranks={RANKS if kind else GROUP}] stream 0x55{handle + 64:010x}\n"
    ).encode()


def _against_grep(path: Path, pairs: int) -> Result:
    """Alternates the two, so that both run under the same load of the machine."""
    read, grep = [sys.executable, "-m", "llmb.cli.main", "nccl", str(path), "--json"], ["grep", "-c", NEEDLE, str(path)]
    timings = [(_seconds(read), _seconds(grep)) for _ in range(pairs)]
    seconds, grep_seconds = (statistics.median(column) for column in zip(*timings, strict=True))
    gigabytes = path.stat().st_size / 1e9
    return Result("one log, 64 ranks", gigabytes, seconds, grep_seconds, grep_seconds / seconds, _peak_mib(read))


def _seconds(command: list[str]) -> float:
    """Wall-clock time of a whole process."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.PIPE, check=True)  # into /dev/null, grep would stop at the first match
    return time.perf_counter() - start


def _peak_mib(command: list[str]) -> float:
    """The kernel's high-water mark of a process, polled."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak_kib = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak_kib = max([peak_kib, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
        time.sleep(0.01)
    return peak_kib / 1024


def _print_table(result: Result) -> None:
    table = Table(title="llmb nccl, whole process, median", box=None)
    for column in ("case", "target", "GB", "llmb (s)", "GB/s", "grep -c (s)", "rate / grep's", "peak (MiB)"):
        table.add_column(column, justify="left" if column in ("case", "target") else "right")
    figures = (
        result.gigabytes,
        result.seconds,
        result.gigabytes / result.seconds,
        result.grep_seconds,
        result.rate_over_grep,
        result.peak_mib,
    )
    table.add_row(result.case, f">= {TARGET:.3f} of grep's", *(f"{value:.4g}" for value in figures))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
