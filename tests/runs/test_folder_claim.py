# SPDX-License-Identifier: Apache-2.0
"""A run has its folders for itself, and can write to them, before anything is trained."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmb.base import trust
from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.base.trust import foreign_link
from llmb.runs import experiment
from llmb.runs.experiment import create_run_folder, release_checkpoints, run_parent
from llmb.runs.folder import RunFolder, new_numbered, write_newest
from llmb.runs.plan import Plan
from llmb.runs.record import new_record, read_job, read_record, write_record

MakePlan = Callable[..., Plan]


def left_in(install: Path) -> list[Path]:
    return [path for path in install.rglob("*") if path.parent.parent.name == "experiments"]


@pytest.mark.parametrize(
    ("place", "reason"), [("file", "it is a file"), ("file/below", "Not a directory"), ("/proc/llmb-checkpoints", "")]
)
def test_a_place_that_takes_no_checkpoints_is_told_and_nothing_is_left(
    tmp_path: Path, tiny_plan: MakePlan, place: str, reason: str
) -> None:
    (tmp_path / "file").write_text("")
    plan = tiny_plan(save_checkpoint=True, checkpoint_dir=str(tmp_path / place))
    with pytest.raises(EnvironmentProblem, match=f"checkpoints cannot be saved there: {reason}") as caught:
        create_run_folder(tmp_path / "install", plan)
    assert caught.value.where == str(tmp_path / place)
    assert "--checkpoint-dir" in str(caught.value)
    assert left_in(tmp_path / "install") == []


def test_a_place_that_takes_a_folder_but_no_file_is_told(
    tmp_path: Path, tiny_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(experiment.os, "fsync", full)
    plan = tiny_plan(save_checkpoint=True, checkpoint_dir=str(tmp_path / "saved"))
    with pytest.raises(EnvironmentProblem, match="checkpoints cannot be saved there: Disk quota exceeded"):
        create_run_folder(tmp_path / "install", plan)
    assert list((tmp_path / "saved").iterdir()) == []
    assert left_in(tmp_path / "install") == []


def test_runs_of_two_roots_never_save_to_one_folder(
    tmp_path: Path, tiny_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment.time, "time", lambda: 1_700_000_000.7)
    plan = tiny_plan(save_checkpoint=True, checkpoint_dir=str(tmp_path / "saved"))
    one, other = (create_run_folder(tmp_path / name, plan) for name in ("one", "other"))
    assert other.path.parent.name == f"{one.path.parent.name}-2"
    assert [path.is_dir() for path in (one.checkpoints_of(plan), other.checkpoints_of(plan))] == [True, True]
    assert len(left_in(tmp_path / "other")) == 1
    (other.checkpoints_of(plan) / "step=1").mkdir()
    release_checkpoints(one, plan)
    release_checkpoints(other, plan)
    assert list((tmp_path / "saved").iterdir()) == [other.checkpoints_of(plan)]


@pytest.fixture
def somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this user makes is not this process's."""
    monkeypatch.setattr(trust.os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(trust, "ADMINISTRATOR", -1)
    monkeypatch.setattr(trust, "_owner", lambda root: None)


def test_a_run_folder_behind_another_users_link_is_not_followed(
    tmp_path: Path, tiny_plan: MakePlan, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    plan = tiny_plan()
    install, parent = tmp_path / "root", run_parent(tmp_path / "root", plan)
    target = create_run_folder(tmp_path / "own", plan)
    write_record(target, new_record(plan, ()))
    install.symlink_to(tmp_path / "real")  # the choice of whoever set up the root
    (tmp_path / "real").mkdir()
    (parent / "run").mkdir(parents=True)
    linked = RunFolder(parent / "run" / target.name)
    linked.path.symlink_to(target.path)
    assert read_record(linked) == read_record(target)
    with monkeypatch.context() as patch:
        patch.setattr(trust, "ADMINISTRATOR", -1)
        patch.setattr(trust.os, "geteuid", lambda: os.getuid() + 1)
        assert read_record(linked) == read_record(target), "the link is of the root's owner"
    request.getfixturevalue("somebody_else")
    assert foreign_link(linked.path) == linked.path
    for read in (read_record, read_job):
        with pytest.raises(PermissionError, match="another user's link"):
            read(linked)
    assert read_record(target).plan == plan
    for place, write in {
        ".llmb/bench": lambda path: write_newest(path / "node" / "gemm.json", "{}"),
        "acceptance": lambda path: new_numbered(path, "one", Path.mkdir),
    }.items():
        (install / place).parent.mkdir(parents=True, exist_ok=True)
        (install / place).symlink_to(tmp_path / "own")
        with pytest.raises(UsageError, match="another user's link, which is not followed"):
            write(install / place)
    create_run_folder(install, plan)
    parent.rename(tmp_path / "moved")
    parent.symlink_to(tmp_path / "moved")
    with pytest.raises(UsageError, match="another user's link, which is not followed") as caught:
        create_run_folder(install, plan)
    assert caught.value.where == str(parent)
