# SPDX-License-Identifier: Apache-2.0
"""A folder appears whole or not at all."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from llmb.checkpoints import new_folder as new_folder_module
from llmb.checkpoints.new_folder import new_folder
from llmb.errors import EnvironmentProblem, UsageError


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
    left, others = tmp_path / ".target.0a1b2c3d.partial", tmp_path / ".target2.0a1b2c3d.partial"
    for folder in (left, others):
        folder.mkdir()
        (folder / "file").write_text("x")
    with new_folder(tmp_path / "target"):
        assert not left.exists()
    assert sorted(tmp_path.iterdir()) == [others, tmp_path / "target"]


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with new_folder(target) as partial:
        (partial / "file").write_text("x")
        with pytest.raises(UsageError, match="another llmb is writing to this folder"), new_folder(target):
            pass
        assert (partial / "file").read_text() == "x"
        with new_folder(tmp_path / "target2"):
            pass
    assert sorted(path.name for path in target.iterdir()) == ["file"]


@pytest.mark.parametrize("completed", [True, False])
def test_what_another_process_completes_meanwhile_is_left_alone(
    completed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, usual = tmp_path / "new", Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        names = list(usual(folder))
        if folder == tmp_path:
            names.append(tmp_path / ".new.0123.partial")  # there when names were read, and gone since
            if completed:
                target.mkdir()
                (target / "file").touch()
        return iter(names)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", iterdir)
        if completed:
            with pytest.raises(UsageError, match="already exists"), new_folder(target):
                pass
        else:
            with new_folder(target) as folder:
                (folder / "file").touch()
    assert sorted(tmp_path.iterdir()) == [target]
    assert [path.name for path in target.iterdir()] == ["file"]


def test_what_another_process_completes_before_it_can_be_locked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, left = tmp_path / "new", tmp_path / ".new.0123.partial"
    left.mkdir()
    (left / "file").touch()
    lock = new_folder_module._lock

    def complete_and_lock(stream: IO[str]) -> bool:
        if left.exists() and Path(stream.name).parent == left:
            left.rename(target)
            (target / ".lock").unlink()
        return lock(stream)

    monkeypatch.setattr(new_folder_module, "_lock", complete_and_lock)
    with pytest.raises(UsageError, match="already exists"), new_folder(target):
        pass
    assert sorted(tmp_path.iterdir()) == [target]
    assert [path.name for path in target.iterdir()] == ["file"]


def test_it_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename, rejected = tmp_path / "target", Path.rename, []

    def meanwhile(self: Path, to: Path) -> Path:
        if to == target:
            with pytest.raises(UsageError, match="another llmb is writing to this folder"), new_folder(target):
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
