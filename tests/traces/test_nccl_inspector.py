# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (long sentences)
"""Who has completed the fewest collectives, and who begins them last, by lines of NCCL's Inspector written by hand."""

from pathlib import Path

import pytest
from inspector_lines import inspector_files, inspector_line

from llmb.traces.nccl_inspector import TAIL_BYTES, inspect_folder, is_inspector, late_text, read_inspector
from llmb.traces.nccl_suspects import suspects_text


def tails(*lines: str) -> list[bytes]:
    return ["".join(lines).encode()]


def test_whoever_has_completed_fewer_collectives_is_named() -> None:
    found = read_inspector(text.encode() for text in inspector_files(30, stuck=3).values())
    assert found
    assert (found.processes, found.collectives, found.late) == (4, 119, None)
    assert suspects_text(found.suspects) == (
        "rank 3 on node8 (process 4103) has completed 29 AllReduce operations, 1 fewer than others of a communicator of 4"
        " ranks"
    )


@pytest.mark.parametrize("version", ["v4.0", "v5.0"])
def test_numbers_are_compared_within_a_communicator_and_a_kind(version: str) -> None:
    lines = [
        inspector_line(0, 7, 9, version=version), inspector_line(1, 7, 9, version=version),
        inspector_line(0, 3, 9, operation="AllGather", version=version),
        inspector_line(1, 2, 9, operation="AllGather", communicator="0xbea", version=version),
    ]  # fmt: skip
    assert is_inspector(lines[0])
    found = read_inspector(tails(*lines))
    assert found
    assert found.suspects == ()


def test_a_rank_on_which_collectives_take_the_least_time_is_the_last_to_begin() -> None:
    found = read_inspector(text.encode() for text in inspector_files(30, late=2).values())
    assert found
    assert found.late
    assert late_text(found.late) == (
        "rank 2 of a communicator of 4 ranks on node8 (process 4102) was the last to begin 30 of 30 collectives, for 0.609"
        " ms each"
    )


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(inspector_files(30), id="chance"),
        pytest.param(inspector_files(10, late=2), id="few collectives"),
        pytest.param(dict(list(inspector_files(30, late=2).items())[1:]), id="a rank is missing"),
    ],
)
def test_no_rank_is_called_late_by_chance(files: dict[str, str]) -> None:
    found = read_inspector(text.encode() for text in files.values())
    assert found
    assert found.late is None


def test_a_file_that_ends_anywhere_tells_less() -> None:
    raw = "".join(inspector_files(1, stuck=1).values()).encode()
    for cut in range(len(raw)):
        for part in (raw[:cut], raw[cut:]):
            found = read_inspector([part])
            assert found is None or found.collectives <= 3


@pytest.mark.parametrize(
    "line",
    [
        '{"header":{"id":"0x1","rank":0,"n_ranks":2,"nnodes":1},"metadata":{"hostname":"n","pid":1},"p2p_perf":{}}',
        inspector_line(-1, 2, 3),
        inspector_line(0, 2, 3).replace("node7", "n" * 300),
        "[" * 10_000,
        "",
    ],
    ids=["send", "negative", "long", "deep", "empty"],
)
def test_other_lines_are_left_out(line: str) -> None:
    assert read_inspector(tails(line + "\n", inspector_line(0, 2, 3))) == read_inspector(tails(inspector_line(0, 2, 3)))
    assert read_inspector(tails(line)) is None


def test_only_the_ends_of_long_files_are_read(tmp_path: Path) -> None:
    assert inspect_folder(tmp_path / "none") is None
    assert inspect_folder(tmp_path) is None
    for name, text in inspector_files(2000, stuck=0).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pipe.log").mkdir()
    (tmp_path / "other.txt").write_text(inspector_line(0, 9000, 1))
    found = inspect_folder(tmp_path)
    assert found
    assert 4 * TAIL_BYTES / 500 < found.collectives < 4 * TAIL_BYTES / 300
    assert [(item.rank, item.operations, item.behind) for item in found.suspects] == [(0, 1999, 1)]
