# SPDX-License-Identifier: Apache-2.0
"""How much memory importing weights takes, and how fast it is: a synthetic Hugging Face model, one process and two.

The model is Llama 3.1 8b with as many layers as the size asks for, in bf16, in files of 5 GB. Memory is that of all
processes together: the largest sum of their resident sets, in which libraries that they share count for each of them.
Then the import is killed in the middle, with SIGKILL, and started again. Needs disk space of 2.1 times the size.

Target: less than 2 GB of memory with two processes, whatever the size; after the kill, the same checksums.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Model
from llmb.catalogue.resolve import find_model
from llmb.catalogue.throughput import parameter_count
from llmb.runs.checkpoints.checkpoint import read_checkpoint
from llmb.runs.checkpoints.conversion_request import FILE_BYTES
from llmb.runs.huggingface.model_config import config_of
from llmb.runs.huggingface.tensors import (
    CONFIG,
    INDEX,
    Shape,
    format_of,
    index_document,
    plan_shards,
    shard_files,
    stored_tensors,
)
from llmb.setup.prepare.conversion import ImportRequest, import_checkpoint

GB = 10**9
TARGET_BYTES = 2 * GB
SHARD_BYTES = 5 * GB
BF16 = 2
SAMPLE_EVERY_S = 0.02
WORKLOAD = "pretrain_llama3.1"
FILES = 10
"""At least so many, so that there is something to resume with."""
INSIDE = """
import sys
from pathlib import Path
from llmb.catalogue.records import Model
from llmb.setup.prepare.conversion import ImportRequest, import_checkpoint
source, target, model, largest = sys.argv[1:]
model = Model.model_validate_json(model)
request = ImportRequest(Path(source), Path(target), "pretrain_llama3.1", model, 2, int(largest))
import_checkpoint(request, lambda done, total: print(done, total, flush=True), print)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        document = measure(Path(name), sized_model(options.gigabytes * GB))
    if options.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{name:28} {value:8.3f}\n" for name, value in document.items()))
    met = document["memory_gb_2_processes"] * GB < TARGET_BYTES and document["same_checksums_after_kill"]
    sys.exit(0 if met else 1)


def sized_model(size: float) -> Model:
    """A model of at most ``size`` bytes in bf16 if its vocabulary allows, which is cut for less than 2 GB."""
    model = find_model(Catalogue(), WORKLOAD, "8b")
    if size < 2 * GB:
        model = model.model_copy(update={"vocab_size": 16384})
    layers = range(1, model.layers + 1)
    sizes = {count: BF16 * parameter_count(model.model_copy(update={"layers": count}))[0] for count in layers}
    return model.model_copy(update={"layers": max((n for n, bytes_ in sizes.items() if bytes_ <= size), default=1)})


def measure(folder: Path, model: Model) -> dict[str, Any]:
    source = folder / "source"
    bytes_ = write_model(source, model)
    document: dict[str, Any] = {"gigabytes": bytes_ / GB}
    checksums = []
    for processes in (1, 2):
        target = folder / f"imported{processes}"
        seconds, peak = run_import(source, target, model, processes)
        document |= {
            f"seconds_{processes}_processes": seconds,
            f"gb_per_s_{processes}_processes": bytes_ / GB / seconds,
            f"memory_gb_{processes}_processes": peak / GB,
        }
        checksums.append(read_checkpoint(target).record.crc32)
        shutil.rmtree(target)
    target = folder / "resumed"
    document["finished_files_at_kill"] = kill_in_the_middle(source, target, model)
    run_import(source, target, model, 2)
    checksums.append(read_checkpoint(target).record.crc32)
    return {**document, "same_checksums_after_kill": checksums[0] == checksums[1] == checksums[2]}


def file_bytes(model: Model) -> int:
    return min(FILE_BYTES, BF16 * parameter_count(model)[0] // FILES)


def write_model(folder: Path, model: Model) -> int:
    """Normal values in bf16, a tensor in memory at a time; the number of bytes of weights."""
    from llmb.engine.weights.weights_import import parameter_shapes

    folder.mkdir(parents=True)
    form = format_of(model)
    shapes: dict[str, Shape] = {}
    for name, shape in parameter_shapes(model).items():
        shapes |= stored_tensors(name, shape, form)
    sizes = {name: BF16 * math.prod(shape) for name, shape in shapes.items()}
    shards = plan_shards(sizes, SHARD_BYTES)
    for names, file in zip(shards, shard_files(len(shards)), strict=True):
        write_safetensors(folder / file, {name: shapes[name] for name in names})
    if len(shards) > 1:
        (folder / INDEX).write_text(json.dumps(index_document(shards, sum(sizes.values()))))
    (folder / CONFIG).write_text(json.dumps(config_of(model, "bf16")))
    return sum(sizes.values())


def write_safetensors(path: Path, shapes: Mapping[str, Shape]) -> None:
    import torch

    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + BF16 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(1)
    some = torch.randn(2**20, generator=generator).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            times, rest = divmod(BF16 * math.prod(shape), len(some))
            stream.writelines([some] * times)
            stream.write(some[:rest])


def run_import(source: Path, target: Path, model: Model, processes: int) -> tuple[float, int]:
    """Seconds, and the largest sum of the resident sets of the processes that convert."""
    with PeakMemory() as memory:
        began = time.perf_counter()
        request = ImportRequest(source, target, WORKLOAD, model, processes, file_bytes(model))
        import_checkpoint(request, lambda *_: None, lambda _: None)
        return time.perf_counter() - began, memory.peak


def kill_in_the_middle(source: Path, target: Path, model: Model) -> int:
    """The number of files that were finished when half of the bytes were converted, and the import was killed."""
    command = [sys.executable, "-c", INSIDE, str(source), str(target), model.model_dump_json(), str(file_bytes(model))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for done, total in numbers(process.stdout):
            if done >= total / 2:
                started = descendants(process.pid)
                process.kill()
                break
    while any(resident(pid) for pid in started):
        time.sleep(SAMPLE_EVERY_S)
    journal = target.with_name(f".{target.name}.partial") / "import.jsonl"
    return len(journal.read_text().splitlines()) - 1


def numbers(lines: Any) -> Iterator[tuple[int, int]]:  # noqa: ANN401 (a text file)
    for line in lines:
        done, total = line.split()
        yield int(done), int(total)


class PeakMemory:
    """Samples the resident sets of this process's descendants."""

    def __enter__(self) -> "PeakMemory":
        self.peak = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()

    def _sample(self) -> None:
        while not self.ended.wait(SAMPLE_EVERY_S):
            self.peak = max(self.peak, sum(map(resident, descendants(os.getpid()))))


def descendants(pid: int) -> list[int]:
    """Process ids of all that ``pid`` started, directly or not."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        own = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []  # it ended
    return [*own, *(other for child in own for other in descendants(child))]


def resident(pid: int) -> int:
    """Bytes; 0 of a process that ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    main()
