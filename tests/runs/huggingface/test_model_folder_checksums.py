# SPDX-License-Identifier: Apache-2.0
"""A file that is not as the hub has it is found, whichever way it was downloaded."""

import hashlib
import time
from pathlib import Path

import pytest

from llmb.base.errors import UsageError
from llmb.runs.huggingface.model_folder import WeightsFolder, corrupt_files, hub_checksums
from llmb.setup.prepare.conversion import check_content

CONTENT = bytes(range(256)) * 50_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A snapshot in the hub's cache: weights are linked by SHA-256, small files by another checksum."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, blob in (("model.safetensors", SHA256), ("config.json", "0" * 40)):
        (blobs / blob).write_bytes(CONTENT)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """What 'hf download --local-dir' leaves."""
    folder = tmp_path / "local"
    records = folder / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(CONTENT)
    (records / "model.safetensors.metadata").write_text(f"c0ffee\n{SHA256}\n{time.time()}\n")
    return folder


@pytest.mark.parametrize("folder", ["cache", "local"])
def test_the_hubs_checksum_is_known_and_compared(folder: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(folder)
    known = hub_checksums(path, ["model.safetensors", "config.json"])
    assert known == {"model.safetensors": SHA256}
    read: list[int] = []
    assert corrupt_files(path, known, 2, read.append) == []
    assert sum(read) == len(CONTENT)
    file = (path / "model.safetensors").resolve()
    file.write_bytes(CONTENT[:-1] + b"x")
    assert corrupt_files(path, known, 2, read.append) == ["model.safetensors"]


def test_a_corrupt_file_is_named_before_anything_is_converted(cache: Path) -> None:
    source = WeightsFolder("huggingface", cache, {}, ("model.safetensors",), (), cache)
    notes: list[str] = []
    progress: list[tuple[int, int]] = []
    check_content(source, 1, lambda *bytes_: progress.append(bytes_), notes.append)
    assert notes == ["verifying the hub's checksums of 1 files, 0.0128 GB"]
    assert progress[-1] == (len(CONTENT), len(CONTENT))
    (cache / "model.safetensors").resolve().write_bytes(CONTENT[1:])
    with pytest.raises(UsageError, match=r"these files are corrupt.*\n  - model\.safetensors"):
        check_content(source, 1, lambda *bytes_: None, notes.append)


def test_a_file_that_was_changed_since_its_download_has_no_known_checksum(local: Path) -> None:
    record = local / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    record.write_text(f"c0ffee\n{SHA256}\n{time.time() - 3600}\n")
    assert hub_checksums(local, ["model.safetensors"]) == {}
    record.write_text("garbage")
    assert hub_checksums(local, ["model.safetensors"]) == {}


def test_an_interrupt_does_not_wait_for_all_files(tmp_path: Path) -> None:
    names = [f"{number}.safetensors" for number in range(200)]
    for name in names:
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(2**25)
    read: list[int] = []

    def interrupt(size: int) -> None:
        if read:
            time.sleep(0.1)  # with all other files, the two threads give this one ten seconds to learn of it
        read.append(size)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corrupt_files(tmp_path, dict.fromkeys(names, SHA256), 2, interrupt)
    assert len(read) < len(names)
