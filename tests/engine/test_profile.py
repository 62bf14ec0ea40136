# SPDX-License-Identifier: Apache-2.0
"""What the PyTorch profiler recorded is written as a whole, or not at all."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
import torch

from llmb.base.errors import EnvironmentProblem
from llmb.engine.profile import TorchRecorder, pack

# What torch 2.11 says of every recording, also of one with a single cycle.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")


def record(path: Path) -> None:
    recorder = TorchRecorder(path, torch.device("cpu"))
    recorder.start()
    torch.ones(4) + 1
    recorder.stop()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_trace_is_packed_and_nothing_else_is_left(tmp_path: Path, temporary: Path) -> None:
    path = tmp_path / "torch_profile" / "rank-0.json.gz"
    record(path)
    names = [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert "aten::add" in names
    assert list(path.parent.iterdir()) == [path]
    assert list(temporary.glob("llmb-profile-*")) == []


def test_what_cannot_be_kept_gives_its_space_back(tmp_path: Path, temporary: Path) -> None:
    """The rest of the run needs it."""
    path = tmp_path / "torch_profile" / "rank-0.json.gz"
    path.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        record(path)
    assert list(path.parent.iterdir()) == [path]
    assert list(temporary.glob("llmb-profile-*")) == []


def test_folders_that_cannot_be_written_are_told_before_a_step_is_profiled(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="the profile cannot be written: Not a directory"):
        TorchRecorder(tmp_path / "file" / "torch_profile" / "rank-0.json.gz", torch.device("cpu"))
    temporary.rmdir()
    with pytest.raises(EnvironmentProblem, match="the profile cannot be written: No such file") as caught:
        TorchRecorder(tmp_path / "torch_profile" / "rank-0.json.gz", torch.device("cpu"))
    assert "TMPDIR" in str(caught.value)
    assert list((tmp_path / "torch_profile").iterdir()) == []


@pytest.mark.parametrize("written", [False, True])
def test_a_trace_that_torch_could_not_write_is_none(tmp_path: Path, written: bool) -> None:
    whole = tmp_path / "trace.json"
    if written:
        whole.touch()
    with pytest.raises(OSError, match="set TMPDIR"):
        pack(whole, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
