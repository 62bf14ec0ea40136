# SPDX-License-Identifier: Apache-2.0
"""What the program that converts weights is told, and what it tells: one JSON document each way a line."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from llmb.catalogue.records import Model, Record
from llmb.errors import EnvironmentProblem, LlmbError, RunFailed, UsageError
from llmb.huggingface.config import ExportDtype

ERRORS = {kind.__name__: kind for kind in (UsageError, EnvironmentProblem, RunFailed)}
"""Errors that can cross from one program to the other."""

OnProgress = Callable[[int, int], None]
"""Is given the bytes that are done and the bytes in all."""


class ExportJob(Record):
    """Weights of the checkpoint at ``checkpoint`` into safetensors files in ``folder``, which is there and empty."""

    kind: Literal["export"] = "export"
    checkpoint: str
    folder: str
    model: Model
    dtype: ExportDtype
    largest_file_bytes: int


class ImportJob(Record):
    """Weights from safetensors ``files`` in ``source`` into a checkpoint in ``folder``, which is there and empty."""

    kind: Literal["import"] = "import"
    source: str
    files: tuple[str, ...]
    folder: str
    model: Model


Job = Annotated[ExportJob | ImportJob, Field(discriminator="kind")]


class ErrorRecord(Record):
    """An LlmbError on its way from one program to the other."""

    kind: str
    what: str
    where: str | None = None
    choices: tuple[str, ...] = ()
    do: str | None = None


class Said(Record):
    """One line of the converting program; one of its fields is set. ``progress`` is (bytes done, bytes in all)."""

    progress: tuple[int, int] | None = None
    note: str | None = None
    error: ErrorRecord | None = None


def parse_job(text: str) -> ExportJob | ImportJob:
    job: ExportJob | ImportJob = TypeAdapter(Job).validate_json(text)
    return job


def error_record(error: LlmbError) -> ErrorRecord:
    return ErrorRecord(
        kind=type(error).__name__, what=error.what, where=error.where, choices=error.choices, do=error.do
    )


def error_from(record: ErrorRecord) -> LlmbError:
    return ERRORS[record.kind](record.what, where=record.where, choices=record.choices, do=record.do)
