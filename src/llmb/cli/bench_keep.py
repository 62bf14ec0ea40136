# SPDX-License-Identifier: Apache-2.0
"""Shared by the commands of ``llmb bench`` that measure here: they save what they measured, and show it in any case."""

from collections.abc import Callable, Sequence
from pathlib import Path

from llmb.bench.kept_measurements import write_measurements
from llmb.bench.records import MeasurementFile


def save_and_show(install: Path, files: Sequence[MeasurementFile], show: Callable[[], None]) -> tuple[str, ...]:
    """Where they were saved. Raises NotWritable after the result is shown: minutes of measuring may be in it."""
    try:
        return tuple(str(write_measurements(install, file)) for file in files)
    finally:
        show()
