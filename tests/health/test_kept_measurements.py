# SPDX-License-Identifier: Apache-2.0
"""Of each node, benchmark and recipe the newest measurements are kept, and those before."""

from pathlib import Path
from typing import Any

import pytest

from llmb.bench.measurements import Measurement, MeasurementFile, bench_folder, read_measurements, write_measurements
from llmb.errors import UsageError

WHEN = "2026-11-22T10:00:00+00:00"


def file(node: str = "node-1", at: str = WHEN, seconds: float = 1.0, **fields: Any) -> MeasurementFile:
    row = Measurement(benchmark="gemm", case="qkv", node=node, device="a CPU", time_s=seconds, repetitions=3)
    own = {"node": node, "measured_at": at, "command": ("llmb",), "software": {"torch": "2"}, "measurements": (row,)}
    return MeasurementFile(**own, **fields)


def test_the_newest_and_the_one_before_are_kept(tmp_path: Path) -> None:
    assert read_measurements(tmp_path) == []
    written = [file(seconds=float(number)) for number in range(1, 5)]
    (path,) = {write_measurements(tmp_path, one) for one in written}
    assert path.parent == tmp_path / ".llmb" / "bench" / "node-1"
    assert read_measurements(tmp_path) == written[-2:], "of the same second, in the order they were written in"
    other = file(recipe="another")
    write_measurements(tmp_path, other)
    assert len(read_measurements(tmp_path)) == 3, "of another recipe"


def test_they_are_read_in_order_of_time_and_by_node(tmp_path: Path) -> None:
    late, early = file(at="2026-11-22T12:00:00+00:00"), file("node-2", at="2026-11-22T12:30:00+02:00")
    for one in (late, early):
        write_measurements(tmp_path, one)
    assert read_measurements(tmp_path) == [early, late]
    assert read_measurements(tmp_path, "node-2") == [early]


def test_a_nodes_name_never_leads_elsewhere(tmp_path: Path) -> None:
    path = write_measurements(tmp_path, file("../../etc"))
    assert path.parent.parent == bench_folder(tmp_path)
    assert read_measurements(tmp_path, "../../etc") == [file("../../etc")]


def test_a_file_of_something_else_or_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = write_measurements(tmp_path, file())
    untimed = [file(at=at).model_dump_json().encode() for at in ("yesterday", "2026-11-22T10:00:00")]
    for content in (b"{}", b"\xff\xfe", *untimed):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="not a file of measurements") as error:
            read_measurements(tmp_path)
        assert error.value.where == str(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="cannot be read") as error:
        read_measurements(tmp_path)
    assert error.value.where == str(path)
