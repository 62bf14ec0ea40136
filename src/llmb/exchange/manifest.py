# SPDX-License-Identifier: Apache-2.0
"""What is in an archive of runs: which files of a run folder, their checksums, and where each run comes from. Pure."""

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import ValidationError

from llmb.catalogue.record import first_problem
from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.input_files import check_values
from llmb.runs.folder import RunFolder
from llmb.runs.record import Time
from llmb.traces import NCCL_FOLDER, NSYS_FOLDER, TORCH_FOLDER
from llmb.trust import WORKLOADS

ENDING = ".tar.zst"
MANIFEST = "manifest.json"
VERSION: Literal[1] = 1
MOST_VALUES = 1 << 20
"""Values of the manifest: an archive of as many files as one may have has 0.8 million."""
TRACES = (TORCH_FOLDER, NSYS_FOLDER, NCCL_FOLDER)
_NAME = r"\w[\w.+=@,-]{0,199}"
_KEPT = re.compile(
    r"(?:run\.json|metrics\.jsonl|metrics-attempt\d{1,6}\.jsonl|rank_times\.jsonl|expert_load\.json|breakdown\.json"
    rf"|checkpoints\.jsonl|resources/{_NAME}\.jsonl|log-{_NAME}\.out|sbatch_{_NAME}\.out)",
    re.ASCII,
)
"""Results, logs and samples. No batch script and no specification of a job: a retry would execute these."""
_TRACE = re.compile(rf"(?:{'|'.join(TRACES)})/(?:{_NAME}/){{0,3}}{_NAME}", re.ASCII)
_FOLDER = re.compile(rf"{WORKLOADS}/{_NAME}/experiments/({_NAME})/{_NAME}/\1(\.\d{{1,6}})?", re.ASCII)


class ArchivedFile(Record):
    """A file as it is in the archive."""

    path: str
    size: int
    sha256: str


class ArchivedRun(Record):
    """A run, and the job that it was. ``folder`` is relative to the root of installation."""

    run_id: str
    folder: str
    campaign: str | None
    scheduler: str | None
    job_id: str | None


class Manifest(Record):
    """The first file of an archive."""

    format: Literal["llmb-archive"] = "llmb-archive"
    version: Literal[1] = VERSION
    llmb_version: str
    created_at: Time
    traces: bool
    runs: tuple[ArchivedRun, ...]
    files: tuple[ArchivedFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def json_size(self) -> int:
        """Bytes of records, steps and samples."""
        return sum(file.size for file in self.files if file.path.endswith((".json", ".jsonl")))


def is_kept(name: str) -> bool:
    """Whether a file of a run folder, by its path there, is for archives; a trace only if traces are wanted."""
    return bool(_KEPT.fullmatch(name))


def is_trace(name: str) -> bool:
    return bool(_TRACE.fullmatch(name))


def archived_folder(workload: str, folder: RunFolder, started_s: int) -> str:
    """Where a run is in an archive: as in a root, wherever it is now. Raises UsageError for names that are not kept."""
    experiment = re.sub(r"\.\d+$", "", folder.name)
    group = folder.path.parent.name
    group = group if group.startswith(experiment) else f"{experiment}_{started_s}"
    path = f"{WORKLOADS}/{workload}/experiments/{experiment}/{group}/{folder.name}"
    if not _FOLDER.fullmatch(path):
        raise UsageError("the name of this run's folder cannot be in an archive", where=str(folder.path))
    return path


def read_manifest(text: bytes) -> Manifest:
    """Raises ValueError with what is wrong with it: its form, its version, or a path that leads elsewhere."""
    check_values(text, MOST_VALUES)
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        place, wrong = first_problem(error)
        if place == "version":
            raise ValueError(f"its version is not {VERSION}, which this llmb reads; use a newer llmb") from error
        raise ValueError(f"its manifest is damaged: {place}: {wrong}") from error
    for problem in _problems(manifest):
        raise ValueError(problem)
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    folders, names = [run.folder for run in manifest.runs], [file.path for file in manifest.files]
    if len({*folders}) < len(folders) or len({*names}) < len(names):
        yield "its manifest has a name twice"
    yield from (f"it has no such place for a run: '{folder}'" for folder in folders if not _FOLDER.fullmatch(folder))
    known = {*folders}
    for file in manifest.files:
        folder = "/".join(file.path.split("/")[:6])
        name = file.path[len(folder) + 1 :]
        if folder not in known or not (is_kept(name) or is_trace(name)):
            yield f"it has a file that is none of a run: '{file.path}'"
        if file.size < 0:
            yield f"a file of it has no size: '{file.path}'"
    yield from (f"a run of it has no record: '{folder}'" for folder in folders if f"{folder}/run.json" not in {*names})
