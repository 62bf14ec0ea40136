# SPDX-License-Identifier: Apache-2.0
"""Every file of a checkpoint is what was saved, or is named."""

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.runs.checkpoints import checkpoint_files as checksums
from llmb.runs.checkpoints.checkpoint_files import ChecksumWriter, damaged_files, file_checksum


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 30))
def test_the_checksum_of_what_is_written_is_that_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], block: int
) -> None:
    path = tmp_path_factory.mktemp("written") / "file"
    with ChecksumWriter(path) as stream:
        for part in parts:
            stream.write(memoryview(part))
    assert path.read_bytes() == b"".join(parts)
    blocks: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "BLOCK", block)
        found = file_checksum(path, lambda: blocks.append(1))
    assert found == stream.checksum == f"{zlib.crc32(b''.join(parts)):08x}"
    assert len(blocks) == -(-len(b"".join(parts)) // block)


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    for number in range(4):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 1000)
    return {str(number): file_checksum(tmp_path / str(number)) for number in range(4)}


def test_flipped_swapped_and_missing_files_are_named(tmp_path: Path, saved: dict[str, str]) -> None:
    assert list(damaged_files(tmp_path, saved, threads=3)) == []
    content = bytearray((tmp_path / "0").read_bytes())
    content[500] ^= 1
    (tmp_path / "0").write_bytes(content)
    (tmp_path / "1").rename(tmp_path / "other")
    (tmp_path / "2").rename(tmp_path / "1")
    (tmp_path / "other").rename(tmp_path / "2")
    (tmp_path / "3").unlink()
    flipped, one, two, missing = damaged_files(tmp_path, saved, threads=3)
    assert flipped.startswith(f"0 has the checksum {file_checksum(tmp_path / '0')}, not {saved['0']}")
    assert one == f"1 has the checksum {saved['2']}, not {saved['1']}"
    assert two == f"2 has the checksum {saved['1']}, not {saved['2']}"
    assert missing == "3 cannot be read: No such file or directory"
