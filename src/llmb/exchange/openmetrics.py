# SPDX-License-Identifier: Apache-2.0
"""Results as an OpenMetrics text file, which the textfile collector of Prometheus' node exporter reads, too.

All metrics are gauges without a time: that collector refuses times, and knows no other type that is in both formats.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmb.exchange.columns import RESULTS, RunSource, Scalar, rows_of
from llmb.exchange.new_file import new_file

PREFIX = "llmb_"
LABELS = ("run", "label", "campaign", "workload", "size", "dtype", "gpu_type", "scale")
"""What every metric is labeled with."""
DESCRIBING = ("status", "verdict", "program", "llmb_version", "driver", "image")
"""What ``llmb_run``, which is always 1, has in addition."""


def write_openmetrics(runs: RunSource, folder: Path) -> list[Path]:
    path = folder / "llmb.prom"
    rows = list(rows_of(RESULTS, runs()))
    with new_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in _lines(rows))
    return [path]


def _lines(rows: Sequence[Mapping[str, Scalar | None]]) -> Iterator[str]:
    """All runs of a metric follow each other, as both formats require."""
    yield f"# TYPE {PREFIX}run gauge"
    yield from (f"{PREFIX}run{_labels(row, (*LABELS, *DESCRIBING))} 1" for row in rows)
    for name in (column.name for column in RESULTS if column.kind is float):
        values = [(row, value) for row in rows if (value := row[name]) is not None]
        yield from [f"# TYPE {PREFIX}{name} gauge"] if values else []
        yield from (f"{PREFIX}{name}{_labels(row, LABELS)} {_number(value)}" for row, value in values)
    yield "# EOF"


def _labels(row: Mapping[str, Scalar | None], names: Sequence[str]) -> str:
    known = {name: value for name in names if (value := row[name]) is not None}
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in known.items()) + "}"


def _escaped(value: Scalar) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: Scalar) -> str:
    """In full precision, and as both formats write what is not finite."""
    number = float(value)
    return repr(number) if math.isfinite(number) else {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(number)]
