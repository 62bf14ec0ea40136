# SPDX-License-Identifier: Apache-2.0
"""Writes results and steps of runs in the forms that other tools read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from llmb.errors import EnvironmentProblem
from llmb.exchange.columns import ExportedRun, RunSource
from llmb.exchange.tables import write_csv, write_jsonl, write_openmetrics, write_parquet
from llmb.exchange.trackers import write_mlflow, write_mlperf, write_tensorboard, write_wandb
from llmb.programs.conclude import read_ended_run
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_job
from llmb.runs.record_file import BrokenRecord
from llmb.runs.steps import read_steps


class ExportForm(NamedTuple):
    """How runs are written, and what this needs beside llmb: libraries, and the extra that has them."""

    write: Callable[[RunSource, Path], Iterator[Path]]
    """Yields each file when it is complete."""
    extra: str = ""
    libraries: tuple[str, ...] = ()


FORMS = {
    "csv": ExportForm(write_csv),
    "parquet": ExportForm(write_parquet, "export", ("pyarrow",)),
    "jsonl": ExportForm(write_jsonl),
    "openmetrics": ExportForm(write_openmetrics),
    "mlperf": ExportForm(write_mlperf),
    "tensorboard": ExportForm(write_tensorboard, "export", ("tensorboard",)),
    "mlflow": ExportForm(write_mlflow, "mlflow", ("mlflow", "sqlalchemy", "alembic")),
    "wandb": ExportForm(write_wandb, "wandb", ("wandb",)),
}


def exported_run(folder: RunFolder) -> ExportedRun:
    """A run that has ended, with its steps. Raises UsageError, or EnvironmentProblem if it cannot be read."""
    run = read_ended_run(folder)
    try:
        job = read_job(folder)
    except (OSError, BrokenRecord):
        job = None  # only its campaign is not known
    return ExportedRun(run, job.campaign if job else None, read_steps(folder.steps))


def write_export(folders: Sequence[Path], formats: Sequence[str], output: Path) -> list[Path]:
    """Writes the runs of these folders below ``output``; files of these names are replaced.

    Runs are read one after the other, once for each file. Raises EnvironmentProblem if a library is not installed, or
    something cannot be written.
    """
    _need_libraries(FORMS[form] for form in formats)

    def runs() -> Iterator[ExportedRun]:
        yield from map(exported_run, map(RunFolder, folders))

    written: list[Path] = []
    try:
        for form in dict.fromkeys(formats):
            written.extend(FORMS[form].write(runs, output))
    except EnvironmentProblem as error:
        if not written:
            raise
        kept = f"{error.do}; these are complete: {', '.join(path.name for path in written)}"
        raise EnvironmentProblem(error.what, where=error.where, do=kept) from error
    return written


def _need_libraries(forms: Iterable[ExportForm]) -> None:
    missing = {name: form.extra for form in forms for name in form.libraries if find_spec(name) is None}
    if missing:
        do = f"pip install 'llmb[{','.join(dict.fromkeys(missing.values()))}]'"
        raise EnvironmentProblem(f"this needs {' and '.join(missing)}, which is not installed", do=do)
