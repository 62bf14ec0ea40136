# SPDX-License-Identifier: Apache-2.0
"""How fast a file system takes and gives what the ranks of this node save."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import llmb
from llmb.bench.disk import PROGRAM, DiskJob, DiskTiming, way_text
from llmb.bench.jobs import BenchProgress
from llmb.bench.measure import OnProgress
from llmb.bench.records import Measurement, MeasurementFile
from llmb.catalogue.records import Recipe
from llmb.errors import EnvironmentProblem, RunFailed
from llmb.health.facts.disk import mount_of
from llmb.metrics.parameters import checkpoint_bytes
from llmb.processes.talking import run_talking
from llmb.runs.disk_space import check_room
from llmb.runs.folder import cannot_write
from llmb.runs.host import host_name

DEFAULT_BYTES = 2**30
SPARE = 1.02
"""Factor to the space that the files take, for the file system's own records."""


def recipe_checkpoint_bytes(recipe: Recipe) -> int:
    """Bytes of a whole checkpoint."""
    return checkpoint_bytes(recipe.model, recipe.lora)


def ranks_of_a_node(recipe: Recipe, gpus_per_node: int | None) -> int:
    return min(recipe.layout.gpus, gpus_per_node or recipe.layout.gpus)


@contextmanager
def folder_for_files(path: Path) -> Iterator[Path]:
    """A folder in ``path`` that is gone afterwards. Raises EnvironmentProblem."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".llmb-bench-", dir=path))
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_disk(job: DiskJob, on_progress: OnProgress) -> DiskTiming:
    """Raises EnvironmentProblem without the space, RunFailed if writing or reading failed, or UserInterrupt."""
    need = round(SPARE * job.ranks * job.size_bytes)
    what = f"{job.ranks} file{'' if job.ranks == 1 else 's'} of {job.size_bytes:,} bytes need"
    check_room(what, need, Path(job.folder), "give a smaller --file-size, fewer --ranks, or --path on another disk")

    def follow(line: bytes) -> None:
        on_progress(BenchProgress.model_validate_json(line))

    with folder_for_files(Path(job.folder)) as files, tempfile.TemporaryDirectory(prefix="llmb-bench-") as own:
        asked, answered = Path(own) / "job.json", Path(own) / "timing.json"
        asked.write_text(job.model_copy(update={"folder": str(files)}).model_dump_json())
        ended = run_talking(("-P", "-m", PROGRAM, str(asked), str(answered)), os.environ, follow, "no file is left")
        if ended.code > 0 and ended.last_lines:
            raise RunFailed(f"the disk cannot be measured: {ended.last_lines[-1]}", where=job.folder)
        if ended.code:
            raise ended.failure("the program that measures the disk")
        return DiskTiming.model_validate_json(answered.read_text())


def file_system(path: Path) -> str:
    """What a folder is on, such as ``ext4 at /home``."""
    try:
        mounts = Path("/proc/mounts").read_text()
    except OSError as error:
        raise EnvironmentProblem("the mounts of this machine cannot be read", where=str(error.filename)) from error
    mount = mount_of(str(path.resolve()), mounts)
    return f"{mount.kind} at {mount.folder}" if mount else "unknown"


def disk_file(
    job: DiskJob, timing: DiskTiming, command: tuple[str, ...], measured_at: str, recipe: str | None
) -> MeasurementFile:
    node, device = host_name(), file_system(Path(job.folder))
    rows = [
        Measurement(
            benchmark="disk",
            case=case,
            shape=way_text(timing, job.cache),
            size_bytes=job.size_bytes,
            node=node,
            device=device,
            ranks=job.ranks,
            time_s=median(times),
            repetitions=len(times),
            fastest_s=min(times),
            slowest_s=max(times),
            bandwidth_gb_per_s=job.ranks * job.size_bytes / median(times) / 1e9,
        )
        for case, times in (("write", timing.write_s), ("read", timing.read_s))
    ]
    software = {"llmb": llmb.__version__}
    return MeasurementFile(
        node=node,
        measured_at=measured_at,
        command=command,
        software=software,
        measurements=tuple(rows),
        recipe=recipe,
    )
