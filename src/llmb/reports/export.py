# SPDX-License-Identifier: Apache-2.0
"""Writes results and steps of runs in the formats of other tools.

The libraries of MLflow and W&B write the files for these trackers.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from llmb.base.errors import EnvironmentProblem, pip_install
from llmb.base.scratch import scratch_folder
from llmb.launch.programs.conclude import read_ended_run
from llmb.reports.export_tables import (
    RESULTS,
    STEPS,
    ExportedRun,
    RunSource,
    Scalar,
    write_csv,
    write_jsonl,
    write_openmetrics,
    write_parquet,
    write_tables,
)
from llmb.runs.conditions import identity_of
from llmb.runs.folder import RunFolder, new_file
from llmb.runs.record import read_job_if_whole
from llmb.runs.steps import Step, read_steps

PROJECT = "llmb"
"""The name of MLflow's experiment and of W&B's project."""
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING", "WANDB_ERROR_REPORTING": "false"}
"""Environment variables that disable the telemetry of both libraries, and MLflow's informational messages."""
MLFLOW_STATUSES = {"success": "FINISHED", "cancelled": "KILLED"}
METRICS_AT_ONCE = 1000
"""MLflow's limit on the number of metrics in one call."""


def write_mlflow(runs: RunSource, folder: Path) -> Iterator[Path]:
    """Write a database for ``mlflow ui``. A metric of the result has one value, a metric of steps one for each step."""
    os.environ.update(QUIET)
    from mlflow.tracking import MlflowClient

    path = folder / "mlflow.db"
    with new_file(path) as partial:
        client = MlflowClient(tracking_uri=f"sqlite:///{partial.absolute()}")
        # The location of artifacts, of which there are none; the default would name a folder of this machine.
        experiment = client.create_experiment(PROJECT, artifact_location="mlflow-artifacts:/")
        for run in runs():
            from mlflow.entities import Metric, Param, RunTag

            record = run.run.record
            ended_ms = _milliseconds(record.ended_at or record.started_at)
            begun = client.create_run(experiment, start_time=_milliseconds(record.started_at), run_name=run.id)
            settings, texts, figures = _settings(run), _texts(run), _figures(run)
            metrics = (
                *(Metric(name, value, ended_ms, 0) for name, value in figures.items()),
                *(
                    Metric(name, value, round(1000 * step.ended_s), step.step)
                    for step in run.steps
                    for name, value in scalars_of(run, step)
                ),
            )
            client.log_batch(
                begun.info.run_id,
                params=[Param(name, str(value)) for name, value in settings.items()],
                tags=[RunTag(name, text) for name, text in texts.items()],
            )
            rest = iter(metrics)
            while some := list(islice(rest, METRICS_AT_ONCE)):
                client.log_batch(begun.info.run_id, metrics=some)
            status = MLFLOW_STATUSES.get(run.run.result.status, "FAILED")
            client.set_terminated(begun.info.run_id, status, end_time=ended_ms)
    yield path


def write_wandb(runs: RunSource, folder: Path) -> Iterator[Path]:
    """Write a folder for each run, which ``wandb sync`` uploads to its configured server."""
    os.environ.update(QUIET)
    import wandb

    with scratch_folder("llmb-wandb-") as place:
        logged = {_wandb_path(folder, run): _log_to_wandb(run, place) for run in runs()}
        wandb.teardown()  # its files are complete when the process that writes them has ended
        for path, source in logged.items():
            with new_file(path) as partial:
                shutil.copyfile(source, partial)
            yield path


def _wandb_path(folder: Path, run: ExportedRun) -> Path:
    """Return the path of a run's file, named as by the library, except that the time is the start of the run."""
    started_at = run.run.record.started_at
    when = datetime.fromisoformat(started_at) if started_at else datetime.fromtimestamp(0).astimezone()
    return folder / "wandb" / f"offline-run-{when:%Y%m%d_%H%M%S}-{run.id}" / f"run-{run.id}.wandb"


def _log_to_wandb(run: ExportedRun, place: Path) -> Path:
    """Let the library write a run, and return its file. The library's logs are not exported: they name this machine."""
    import wandb

    settings = wandb.Settings(
        mode="offline",
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )
    texts = _texts(run)
    with wandb.init(
        project=PROJECT,
        id=run.id,
        name=run.id,
        dir=place,
        config={**_settings(run), **texts},
        tags=[texts[name] for name in ("status", "verdict") if name in texts],
        reinit="create_new",
        settings=settings,
    ) as logged:
        for step in run.steps:
            logged.log({**dict(scalars_of(run, step)), "_timestamp": step.ended_s}, step=step.step)
        logged.summary.update(_figures(run))
    return next(place.glob(f"wandb/offline-run-*/run-{run.id}.wandb"))


def _settings(run: ExportedRun) -> dict[str, Scalar]:
    configuration = identity_of(run.run.record).configuration
    return {name: value for name, value in configuration.items() if value is not None}


def _texts(run: ExportedRun) -> dict[str, str]:
    return {column.header: str(value) for column in RESULTS if column.kind is str and (value := column.of(run))}


def _figures(run: ExportedRun) -> dict[str, float]:
    found = ((column.header, column.of(run)) for column in RESULTS if column.kind is float)
    return {name: float(value) for name, value in found if value is not None}


def _milliseconds(text: str | None) -> int:
    return round(1000 * datetime.fromisoformat(text).timestamp()) if text else 0


EVENTS = "events.out.tfevents.llmb"
"""TensorBoard reads files with ``tfevents`` in their name; an equal name replaces the file of an earlier export."""
EVENTS_VERSION = "brain.Event:2"
NOT_SCALARS = ("run", "step", "in_window")


def write_tensorboard(runs: RunSource, folder: Path) -> Iterator[Path]:
    """Write a folder for each run that has steps, with a 32-bit scalar for each known number or flag of a step."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    for run in runs():
        if not run.steps:
            continue
        path = folder / "tensorboard" / run.id / EVENTS
        with new_file(path) as partial, partial.open("wb") as file:
            records = RecordWriter(file)
            first = run.steps[0]
            records.write(
                Event(wall_time=first.ended_s - first.step_time_s, file_version=EVENTS_VERSION).SerializeToString()
            )
            for step in run.steps:
                scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars_of(run, step)]
                event = Event(wall_time=step.ended_s, step=step.step, summary=Summary(value=scalars))
                records.write(event.SerializeToString())
        yield path


def scalars_of(run: ExportedRun, step: Step) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each known number or flag of a step, without the number of the step itself."""
    for column in STEPS:
        value = None if column.header in NOT_SCALARS else column.of((run, step))
        if value is not None:
            yield column.header, float(value)


class ExportForm(NamedTuple):
    """A format for exporting runs, with the libraries that it needs and the extra that installs them."""

    write: Callable[[RunSource, Path], Iterator[Path]]
    """Yields the path of each file once it is complete."""
    extra: str = ""
    libraries: tuple[str, ...] = ()


FORMS = {
    "csv": ExportForm(partial(write_tables, "csv", write_csv)),
    "parquet": ExportForm(partial(write_tables, "parquet", write_parquet), "export", ("pyarrow",)),
    "jsonl": ExportForm(partial(write_tables, "jsonl", write_jsonl)),
    "openmetrics": ExportForm(write_openmetrics),
    "tensorboard": ExportForm(write_tensorboard, "export", ("tensorboard",)),
    "mlflow": ExportForm(write_mlflow, "mlflow", ("mlflow", "sqlalchemy", "alembic")),
    "wandb": ExportForm(write_wandb, "wandb", ("wandb",)),
}


def exported_run(folder: RunFolder) -> ExportedRun:
    """Read an ended run with its steps. Raise UsageError, EnvironmentProblem or OSError if it cannot be read."""
    run = read_ended_run(folder)
    job = read_job_if_whole(folder)
    return ExportedRun(run, job.campaign if job else None, read_steps(folder.steps))


def write_export(folders: Sequence[Path], formats: Sequence[str], output: Path) -> list[Path]:
    """Write the runs in ``folders`` to files below ``output``, replacing existing ones; return the paths of the files.

    Runs are read one after the other, and again for each format or table. Raise EnvironmentProblem if a library is not
    installed or writing fails, and the errors of ``exported_run``.
    """
    wanted = {name: FORMS[form].extra for form in formats for name in FORMS[form].libraries}
    if missing := {name: extra for name, extra in wanted.items() if find_spec(name) is None}:
        do = pip_install(*dict.fromkeys(missing.values()))
        raise EnvironmentProblem(f"packages for this export are not installed: {', '.join(missing)}", do=do)

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
