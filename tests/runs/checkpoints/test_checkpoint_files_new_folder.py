# SPDX-License-Identifier: Apache-2.0
"""A folder appears whole or not at all."""

from pathlib import Path

import pytest

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.runs.checkpoints.checkpoint_files import new_folder


def test_it_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "above" / "target"
    with new_folder(target) as partial:
        (partial / "below").mkdir()
        (partial / "below" / "file").write_text("x")
        assert not target.exists()
        assert partial.parent == target.parent
        assert partial.name.startswith(".target.")
    assert list(target.parent.iterdir()) == [target]
    assert (target / "below" / "file").read_text() == "x"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "target") as partial:
        (partial / "file").write_text("x")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_what_a_killed_attempt_left_is_removed(tmp_path: Path) -> None:
    left, others = tmp_path / ".target.partial", tmp_path / ".target2.partial"
    for folder in (left, others):
        folder.mkdir()
        (folder / "file").write_text("x")
    with new_folder(tmp_path / "target"):
        assert not (left / "file").exists()
    assert sorted(tmp_path.iterdir()) == [others, tmp_path / "target"]


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with new_folder(target) as partial:
        (partial / "file").write_text("x")
        with pytest.raises(UsageError, match="another llmb process is writing to this folder"), new_folder(target):
            pass
        assert (partial / "file").read_text() == "x"
        with new_folder(tmp_path / "target2"):
            pass
    assert sorted(path.name for path in target.iterdir()) == ["file"]


def test_it_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename, rejected = tmp_path / "target", Path.rename, []

    def meanwhile(self: Path, to: Path) -> Path:
        if to == target:
            with pytest.raises(UsageError, match="another llmb process is writing to this folder"), new_folder(target):
                pass
            rejected.append(self)
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", meanwhile)
    with new_folder(target) as partial:
        (partial / "file").write_text("x")
    assert rejected == [partial]
    assert [path.name for path in target.iterdir()] == ["file"]


def test_an_empty_folder_is_taken_over_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with new_folder(target) as partial:
        (partial / "file").write_text("x")
    with pytest.raises(UsageError, match="already exists"), new_folder(target):
        pass
    with pytest.raises(UsageError, match="already exists"), new_folder(target / "file"):
        pass


def test_a_place_that_takes_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentProblem, match="cannot write: "), new_folder(tmp_path / "file" / "target"):
        pass
