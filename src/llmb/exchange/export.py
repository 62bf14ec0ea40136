# SPDX-License-Identifier: Apache-2.0
"""Writes results and steps of runs in the forms that other tools read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from llmb.errors import EnvironmentProblem
from llmb.exchange.columns import ExportedRun, RunSource
from llmb.exchange.step_logs import write_mlperf, write_tensorboard
from llmb.exchange.tables import write_csv, write_jsonl, write_openmetrics, write_parquet
from llmb.exchange.trackers import write_mlflow, write_wandb
from llmb.programs.conclude import read_ended_run
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_job
from llmb.runs.record_file import BrokenRecord
from llmb.runs.steps import read_steps


class ExportFormat(StrEnum):
    CSV = "csv"
    PARQUET = "parquet"
    JSONL = "jsonl"
    OPENMETRICS = "openmetrics"
    MLPERF = "mlperf"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"


WRITERS: Mapping[ExportFormat, Callable[[RunSource, Path], Iterator[Path]]] = {
    ExportFormat.CSV: write_csv,
    ExportFormat.PARQUET: write_parquet,
    ExportFormat.JSONL: write_jsonl,
    ExportFormat.OPENMETRICS: write_openmetrics,
    ExportFormat.MLPERF: write_mlperf,
    ExportFormat.TENSORBOARD: write_tensorboard,
    ExportFormat.MLFLOW: write_mlflow,
    ExportFormat.WANDB: write_wandb,
}
"""Each yields a file when it is complete."""
LIBRARIES = {
    ExportFormat.PARQUET: ("export", ("pyarrow",)),
    ExportFormat.TENSORBOARD: ("export", ("tensorboard",)),
    ExportFormat.MLFLOW: ("mlflow", ("mlflow", "sqlalchemy", "alembic")),
    ExportFormat.WANDB: ("wandb", ("wandb",)),
}
"""What a form needs beside llmb, and the extra that has it."""


def exported_run(folder: RunFolder) -> ExportedRun:
    """A run that has ended, with its steps. Raises UsageError, or EnvironmentProblem if it cannot be read."""
    run = read_ended_run(folder)
    try:
        job = read_job(folder)
    except (OSError, BrokenRecord):
        job = None  # only its campaign is not known
    return ExportedRun(run, job.campaign if job else None, read_steps(folder.steps))


def write_export(folders: Sequence[Path], formats: Sequence[ExportFormat], output: Path) -> list[Path]:
    """Writes the runs of these folders below ``output``; files of these names are replaced.

    Runs are read one after the other, once for each file. Raises EnvironmentProblem if a library is not installed, or
    something cannot be written.
    """
    _need_libraries(formats)

    def runs() -> Iterator[ExportedRun]:
        yield from map(exported_run, map(RunFolder, folders))

    written: list[Path] = []
    try:
        for form in dict.fromkeys(formats):
            written.extend(WRITERS[form](runs, output))
    except EnvironmentProblem as error:
        if not written:
            raise
        kept = f"{error.do}; these are complete: {', '.join(path.name for path in written)}"
        raise EnvironmentProblem(error.what, where=error.where, do=kept) from error
    return written


def _need_libraries(formats: Sequence[ExportFormat]) -> None:
    needed = [LIBRARIES[form] for form in formats if form in LIBRARIES]
    missing = {name: extra for extra, names in needed for name in names if find_spec(name) is None}
    if missing:
        do = f"pip install 'llmb[{','.join(dict.fromkeys(missing.values()))}]'"
        raise EnvironmentProblem(f"this needs {' and '.join(missing)}, which is not installed", do=do)
