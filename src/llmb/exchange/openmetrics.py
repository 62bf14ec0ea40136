# SPDX-License-Identifier: Apache-2.0
"""Results as an OpenMetrics text file, which the textfile collector of Prometheus' node exporter reads, too.

All metrics are gauges without a time: that collector refuses times, and knows no other type that is in both formats.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmb.exchange.columns import RESULTS, ExportedRun, Result, RunSource, Scalar
from llmb.exchange.new_file import new_file

PREFIX = "llmb_"
LABELS = ("run", "label", "campaign", "workload", "size", "dtype", "gpu_type", "scale")
"""What every metric is labeled with."""
DESCRIBING = ("status", "verdict", "program", "llmb_version", "driver", "image")
"""What ``llmb_run``, which is always 1, has in addition."""


def write_openmetrics(runs: RunSource, folder: Path) -> list[Path]:
    path = folder / "llmb.prom"
    with new_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in _lines(list(runs())))
    return [path]


def _lines(runs: Sequence[ExportedRun]) -> Iterator[str]:
    columns = {column.name: column for column in RESULTS}
    common = [columns[name] for name in LABELS]
    yield f"# TYPE {PREFIX}run gauge"
    describing = [*common, *(columns[name] for name in DESCRIBING)]
    yield from (f"{PREFIX}run{_labels(describing, run)} 1" for run in runs)
    for column in RESULTS:
        if column.kind is float:
            values = [(run, value) for run in runs if (value := column.value(run)) is not None]
            yield from [f"# TYPE {PREFIX}{column.name} gauge"] if values else []
            yield from (f"{PREFIX}{column.name}{_labels(common, run)} {_number(value)}" for run, value in values)
    yield "# EOF"


def _labels(columns: Sequence[Result], run: ExportedRun) -> str:
    values = {column.name: column.value(run) for column in columns}
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items() if value is not None) + "}"


def _escaped(value: Scalar) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: Scalar) -> str:
    """In full precision, and as both formats write what is not finite."""
    number = float(value)
    return repr(number) if math.isfinite(number) else {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(number)]
