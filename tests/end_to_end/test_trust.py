# SPDX-License-Identifier: Apache-2.0
"""What another user wrote is not executed, submitted or deleted by: settings, states, links in shared roots."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from called_here import Run

from llmb.base import trust
from llmb.base.errors import UsageError
from llmb.jobs.history import open_history
from llmb.runs.checkpoints.checkpoint import read_checkpoint
from llmb.runs.checkpoints.checkpoint_files import new_folder
from llmb.setup.install.answers import Answers
from llmb.setup.install.install_state import InstalledItem, InstallState, state_path

TINY = ("-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "1")
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(llmb: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A command of a user who has named no root; its exit code and what it printed."""
    for name in ("LLMB_INSTALL", "STAGE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def run(*arguments: object) -> tuple[int, str]:
        done = llmb(*arguments, LLMB_INSTALL=os.environ.get("LLMB_INSTALL", ""))
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def of_others(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes paths those of another user, though this one made them: only the administrator can give files away."""
    own, foreign = os.geteuid() + 1, os.geteuid() + 2
    theirs: set[Path] = set()

    def owner(path: Path) -> int | None:
        return (foreign if path in theirs else own) if path.exists() else None

    def link_owner(path: Path) -> int | None:
        return (foreign if path in theirs else own) if path.is_symlink() else None

    monkeypatch.setattr(trust.os, "geteuid", lambda: own)
    monkeypatch.setattr(trust, "_owner", owner)
    monkeypatch.setattr(trust, "_link_owner", link_owner)
    return lambda *paths: theirs.update(paths)


@pytest.fixture
def settings_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_others: Callable[..., None]) -> Path:
    """A folder in which another user waits, with settings whose interpreter leaves a mark."""
    place = tmp_path / "shared"
    (place / "deep").mkdir(parents=True)
    python = place / "python"
    python.write_text(f"#!/bin/sh\ntouch {place}/mark\n")
    python.chmod(0o755)
    (place / "cluster_config.yaml").write_text(f"python: {python}\ngpu_type: cpu\n")
    of_others(place, place / "cluster_config.yaml", python)
    monkeypatch.chdir(place / "deep")
    return place


@pytest.mark.parametrize(
    "words",
    [
        ("doctor",),
        ("submit", *TINY, "--dry-run"),
        ("run", *TINY, "--gpu-type", "cpu", "--dry-run"),
        ("jobs", "list"),
        ("config", "show"),
    ],
    ids=lambda words: words[0],
)
def test_settings_that_another_user_left_above_the_working_folder_are_refused(
    settings_of_others: Path, call: Call, words: tuple[str, ...]
) -> None:
    code, printed = call(*words)
    assert code == 2
    assert "this belongs to another user" in printed
    assert f"set LLMB_INSTALL={settings_of_others} to use it anyway" in printed
    assert not (settings_of_others / "mark").exists()
    assert f"{settings_of_others}/python" not in printed


def test_a_root_that_is_named_on_purpose_is_its_owners(
    settings_of_others: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(settings_of_others))
    code, printed = call("submit", *TINY, "--gpu-type", "cpu", "--dry-run")
    assert (code, f"{settings_of_others}/python" in printed) == (0, True), printed


def test_a_third_users_settings_in_a_root_of_ones_own_are_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_others: Callable[..., None]
) -> None:
    (tmp_path / "cluster_config.yaml").write_text("gpu_type: cpu\n")
    of_others(tmp_path / "cluster_config.yaml")
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    code, printed = call("submit", *TINY, "--dry-run")
    assert (code, "this belongs to another user" in printed) == (2, True), printed


def test_campaigns_answers_and_defaults_of_others_are_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_others: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)
    campaign, answers, defaults = tmp_path / "jobs.txt", tmp_path / "answers.yaml", tmp_path / "llmb" / "config.yaml"
    campaign.write_text("pretrain_llama3.1 tiny fp32 1\n")
    answers.write_text("scheduler: local\n")
    defaults.parent.mkdir()
    defaults.write_text("gpu_type: cpu\n")
    of_others(campaign, answers, defaults)
    for words in (("bulk", campaign, "--dry-run"), ("install", "--config", answers, "--path", tmp_path / "x", "--yes")):
        code, printed = call(*words)
        assert (code, "this belongs to another user" in printed) == (2, True), printed
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, printed = call("submit", *TINY, "--dry-run")
    assert (code, "this belongs to another user" in printed) == (2, True), printed


def test_the_state_of_another_users_installation_is_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_others: Callable[..., None]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    write_install_state(tmp_path, InstalledItem(path="made", kind="tree"))
    of_others(state_path(tmp_path))
    code, printed = call("install", tmp_path, "--remove", "--yes")
    assert (code, "this belongs to another user" in printed) == (2, True), printed


def test_links_of_others_in_a_shared_root_are_not_followed(tmp_path: Path, of_others: Callable[..., None]) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    (elsewhere / "model").mkdir(parents=True)
    prepared = root / "workloads" / "finetune_llama3" / "checkpoint_and_dataset"
    prepared.mkdir(parents=True)
    for link in (root / ".llmb", prepared / "models"):
        link.symlink_to(elsewhere)
    with open_history(root, print):
        assert (elsewhere / "jobs.sqlite").exists(), "a link of one's own is followed"
    of_others(root / ".llmb", prepared / "models")
    with pytest.raises(UsageError, match="another user's link, which is not followed") as caught:
        open_history(root, print)
    assert caught.value.where == str(root / ".llmb")
    with pytest.raises(UsageError, match="another user's link"):
        read_checkpoint(prepared / "models" / "model")
    with pytest.raises(UsageError, match="another user's link"), new_folder(prepared / "models" / "new"):
        pass
    assert {path.name for path in elsewhere.iterdir()} == {"model", "jobs.sqlite", "open.lock"}


def write_install_state(root: Path, *made: InstalledItem, workloads: tuple[str, ...] = ()) -> None:
    state_path(root).parent.mkdir(exist_ok=True)
    answers = Answers(scheduler="local", workloads=workloads)
    state_path(root).write_text(
        InstallState(root=str(root), made_root=False, answers=answers, made=made).model_dump_json()
    )


@pytest.mark.parametrize("path", ["../precious", "{precious}", "a/../../precious", ".", "out/precious", "out/..", ""])
@pytest.mark.parametrize("kind", ["tree", "file", "folder", "image"])
def test_removing_removes_nothing_outside_of_the_root(tmp_path: Path, call: Call, path: str, kind: str) -> None:
    """Whatever the state of the installation says, and whatever links lie in the root."""
    precious, root = tmp_path / "precious", tmp_path / "root"
    (precious / "precious").mkdir(parents=True)
    (precious / "precious" / "thesis.txt").write_text("all of it")
    root.mkdir()
    (root / "kept.txt").write_text("not the installer's")
    (root / "out").symlink_to(precious)
    write_install_state(root, InstalledItem(path=path.format(precious=precious), kind=kind))
    code, printed = call("install", root, "--remove", "--yes")
    assert (precious / "precious" / "thesis.txt").read_text() == "all of it"
    assert (root / "kept.txt").exists()
    assert "Traceback" not in printed
    assert code in (0, 2)


@pytest.mark.parametrize("workload", ["../../precious", "linked"])
def test_results_are_removed_below_the_root_alone(tmp_path: Path, call: Call, workload: str) -> None:
    root, results = tmp_path / "root", tmp_path / "precious" / "experiments"
    results.mkdir(parents=True)
    (root / "workloads").mkdir(parents=True)
    (root / "workloads" / "linked").symlink_to(tmp_path / "precious")
    write_install_state(root, workloads=(workload,))
    code, printed = call("install", root, "--remove", "--with-results", "--yes")
    assert results.is_dir()
    assert (code, "not below the install root" in printed) == (2, True), printed


def test_a_damaged_state_says_so(tmp_path: Path, call: Call) -> None:
    state_path(tmp_path).parent.mkdir()
    state_path(tmp_path).write_text(json.dumps({"made": "/"}))
    code, printed = call("install", tmp_path, "--remove", "--yes")
    assert (code, "the file is not the state of an installation" in printed) == (2, True), printed
