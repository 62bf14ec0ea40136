# SPDX-License-Identifier: Apache-2.0
"""Measurements are kept per node and date, and nothing that was kept is lost."""

import pytest

from llmb.bench.kept_measurements import bench_folder, read_measurements, write_measurements
from llmb.bench.records import Measurement, MeasurementFile
from llmb.errors import UsageError


def file(node="node-1", at="2026-11-22T10:00:00+00:00", seconds=1.0):
    row = Measurement(benchmark="gemm", case="qkv", node=node, device="a CPU", time_s=seconds, repetitions=3)
    return MeasurementFile(node=node, measured_at=at, command=("llmb",), software={"torch": "2"}, measurements=(row,))


def test_what_was_written_is_read(tmp_path) -> None:
    assert read_measurements(tmp_path) == []
    path = write_measurements(tmp_path, file())
    assert path == tmp_path / ".llmb" / "bench" / "node-1" / "20261122T100000Z_gemm.json"
    assert read_measurements(tmp_path) == [file()]


def test_those_of_one_second_are_kept_and_read_in_the_order_they_were_written_in(tmp_path) -> None:
    written = [file(seconds=float(number)) for number in range(1, 12)]
    names = [write_measurements(tmp_path, one).name for one in written]
    assert names == [f"20261122T100000Z_gemm{f'-{number}' if number > 1 else ''}.json" for number in range(1, 12)]
    assert read_measurements(tmp_path) == written


def test_they_are_read_in_order_of_time_and_by_node(tmp_path) -> None:
    late, early = file(at="2026-11-22T12:00:00+00:00"), file("node-2", at="2026-11-22T12:30:00+02:00")
    for one in (late, early):
        write_measurements(tmp_path, one)
    assert read_measurements(tmp_path) == [early, late]
    assert read_measurements(tmp_path, "node-2") == [early]


def test_a_nodes_name_never_leads_elsewhere(tmp_path) -> None:
    path = write_measurements(tmp_path, file("../../etc"))
    assert path.parent.parent == bench_folder(tmp_path)
    assert read_measurements(tmp_path, "../../etc") == [file("../../etc")]


def test_a_file_of_something_else_or_that_cannot_be_read_is_named(tmp_path) -> None:
    path = write_measurements(tmp_path, file())
    for name in ("being-written.json", "-5.json"):
        path.with_name(name).touch()
    assert read_measurements(tmp_path) == [file()], "an empty file is being written"
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
