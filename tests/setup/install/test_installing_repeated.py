# SPDX-License-Identifier: Apache-2.0
"""Installations that are repeated, extended, moved, killed, undone, and met by files of others."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_installer
import pytest
from killed_installer import tree

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.runs.folder import chosen_root

Install = Callable[..., Any]
LLAMA = ("-w", "pretrain_llama3.1")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def states(done: Any) -> dict[str, str]:
    return {item["name"]: item["state"] for item in json.loads(done.stdout)["steps"]}


def test_a_repeat_does_nothing_and_needs_no_answer_and_a_removal_leaves_no_trace(
    here: Install, call: Install, root: Path
) -> None:
    empty = tree(root.parent)
    assert set(states(here(*LLAMA, "--json")).values()) == {"done"}
    before = tree(root)
    again = call(root, "--json")
    assert set(states(again).values()) == {"kept"}
    assert tree(root) == before
    call(root, "--remove", "--yes")
    assert tree(root.parent) == empty


def test_launch_and_settings_lead_to_the_installation(here: Install, root: Path, small_python: Path) -> None:
    here(*LLAMA)
    lines = (root / "workloads" / "pretrain_llama3.1" / "launch.sh").read_text().splitlines()
    assert lines == [
        "#!/bin/sh",
        f'exec env LLMB_INSTALL={root} {small_python} -P -m llmb.cli.main launch pretrain_llama3.1 "$@"',
    ]
    assert os.access(root / "workloads" / "pretrain_llama3.1" / "launch.sh", os.X_OK)
    assert f"python: {small_python}  # on the nodes" in (root / "cluster_config.yaml").read_text()
    assert chosen_root({"HOME": "/"}, root / "workloads").path == root


def test_it_is_extended_with_a_workload(here: Install, call: Install, root: Path) -> None:
    here(*LLAMA)
    done = call(root, "--add-workload", "pretrain_nemotron4", "--json")
    assert states(done) == {"folders": "done", "environment": "kept", "settings": "kept", "scripts": "done"}
    assert json.loads(done.stdout)["workloads"] == ["pretrain_llama3.1", "pretrain_nemotron4"]


def test_a_failed_step_is_named_and_resumed(here: Install, small_python: Path) -> None:
    works = small_python.read_text()
    small_python.write_text("#!/bin/sh\necho \"No module named 'torch'\" >&2\nexit 1\n")
    with pytest.raises(EnvironmentProblem) as caught:
        here(*LLAMA)
    assert caught.value.what == ("step 2 of 4, environment: this Python cannot be used: No module named 'torch'")
    assert str(caught.value.do).endswith("the same command resumes here")
    small_python.write_text(works)
    assert states(here(*LLAMA, "--json")) == {
        "folders": "kept",
        "environment": "done",
        "settings": "done",
        "scripts": "done",
    }


def test_undo_keeps_what_others_wrote(here: Install, call: Install, root: Path) -> None:
    (root / "workloads").mkdir(parents=True)
    (root / "notes.txt").write_text("mine")
    here(*LLAMA)
    run = root / "workloads" / "pretrain_llama3.1" / "experiments" / "run.json"
    run.parent.mkdir()
    run.write_text("{}")
    (root / "cluster_config.yaml").write_text("gpu_type: cpu\n")
    kept = json.loads(call(root, "--remove", "--yes", "--json").stdout)["kept"]
    assert kept == ["cluster_config.yaml", "workloads/pretrain_llama3.1"]
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert left == {"notes.txt", "cluster_config.yaml", str(run.relative_to(root))}
    with pytest.raises(UsageError, match="nothing was installed here"):
        call(root, "--remove", "--yes")


def test_results_are_removed_only_if_asked(here: Install, call: Install, root: Path) -> None:
    here(*LLAMA)
    run = root / "workloads" / "pretrain_llama3.1" / "experiments" / "run.json"
    run.parent.mkdir()
    run.write_text("{}")
    (root / ".llmb" / "other").mkdir()
    call(root, "--remove", "--yes", "--with-results")
    assert not root.exists()


def test_removing_without_a_terminal_needs_yes(here: Install, call: Install, root: Path) -> None:
    here(*LLAMA)
    before = tree(root)
    with pytest.raises(UsageError, match="there is no terminal"):
        call(root, "--remove")
    assert "cluster_config.yaml" in call(root, "--remove", "--dry-run").stdout
    assert tree(root) == before


def test_settings_that_agree_are_completed_and_others_are_refused(here: Install, root: Path) -> None:
    root.mkdir()
    (root / "cluster_config.yaml").write_text("gpu_type: cpu  # ours")
    here(*LLAMA)
    text = (root / "cluster_config.yaml").read_text()
    assert text.startswith("gpu_type: cpu  # ours\n")
    assert "# Added by 'llmb install':\npython: " in text
    (root / "cluster_config.yaml").write_text("python: /elsewhere/python\n")
    with pytest.raises(UsageError, match="python is '/elsewhere/python', not") as caught:
        here(*LLAMA)
    assert "--keep-settings" in str(caught.value.do)
    assert (root / "cluster_config.yaml").read_text() == "python: /elsewhere/python\n"
    here(*LLAMA, "--keep-settings")
    assert (root / "cluster_config.yaml").read_text() == "python: /elsewhere/python\n"


def test_own_settings_that_their_user_changed_are_kept(here: Install, root: Path) -> None:
    here(*LLAMA)
    changed = (root / "cluster_config.yaml").read_text().replace("cpu", "h100")
    (root / "cluster_config.yaml").write_text(changed)
    done = here(*LLAMA, "--add-workload", "pretrain_qwen3")
    assert (root / "cluster_config.yaml").read_text() == changed
    assert "cluster_config.yaml was changed, and is kept: gpu_type is 'h100', not 'cpu'" in done.stderr


def test_a_python_by_its_name_is_kept_by_its_path(
    call: Install, program: Callable[[str, str], None], small_python: Path, root: Path, tmp_path: Path
) -> None:
    program("our-python", f'exec {small_python} "$@"')
    fixed = ("--scheduler", "local", "--gpu-type", "cpu", "--environment", "existing", "--python", "our-python")
    assert json.loads(call(root, *fixed, *LLAMA, "--json").stdout)["python"] == str(tmp_path / "bin" / "our-python")
    assert set(states(call(root, "--json")).values()) == {"kept"}


def test_a_folder_that_was_moved_is_installed_again(here: Install, call: Install, root: Path, tmp_path: Path) -> None:
    here(*LLAMA)
    new = root.rename(tmp_path / "other place")
    done = call(new)
    assert f"this installation was at {root}" in done.stderr
    assert "llmb jobs rebuild" in done.stderr
    script = (new / "workloads" / "pretrain_llama3.1" / "launch.sh").read_text()
    assert f"'LLMB_INSTALL={new}'" in script
    assert str(root) not in "".join(path.read_text() for path in new.rglob("*") if path.is_file())
    assert set(states(call(new, "--json")).values()) == {"kept"}


def test_two_installers_do_not_meet(here: Install, root: Path) -> None:
    here(*LLAMA)
    with (root / ".llmb" / "install.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(EnvironmentProblem, match="another process is installing"):
            here("-w", "pretrain_qwen3")


def test_a_path_with_spaces(call: Install, small_python: Path, tmp_path: Path) -> None:
    fixed = ("--scheduler", "local", "--gpu-type", "cpu", "--environment", "existing", "--python", small_python)
    call(tmp_path / "a b", *fixed, *LLAMA)
    small_python.write_text('#!/bin/sh\necho "$LLMB_INSTALL|$*"\n')
    script = tmp_path / "a b" / "workloads" / "pretrain_llama3.1" / "launch.sh"
    done = subprocess.run([script, "--dry-run"], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == f"{tmp_path / 'a b'}|-P -m llmb.cli.main launch pretrain_llama3.1 --dry-run\n"


def test_a_full_disk_is_an_error_and_what_follows_resumes(
    small_disk: Callable[[str], list[str]], small_python: Path, tmp_path: Path
) -> None:
    command = ["python", "-m", "llmb.cli.main", "install", str(tmp_path / "disk" / "root"), "--scheduler", "local"]
    command += ["--gpu-type", "cpu", "--environment", "existing", "--python", str(small_python), *LLAMA]
    command[0] = sys.executable
    script = (
        f'head -c 1M /dev/zero > "{tmp_path}/disk/filling"; "$@"; echo "code $?"; rm "{tmp_path}/disk/filling"; "$@"'
    )
    done = subprocess.run(
        [*small_disk("20k"), "sh", "-c", script, "sh", *command], capture_output=True, text=True, check=False
    )
    assert "No space left on device" in done.stderr
    assert "code 3" in done.stdout
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kept" / "root" / "cluster_config.yaml").exists()


measured = pytest.mark.measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "distance", "least_changes"),
    [
        ("install", 3, 30),
        pytest.param("install", 1, 30, marks=measured),
        pytest.param("install in a folder that exists", 1, 30, marks=measured),
        pytest.param("extend", 1, 3, marks=measured),
        pytest.param("remove", 1, 10, marks=measured),
    ],
)
def test_killed_before_any_change_and_repeated_it_ends_the_same(
    case: str, distance: int, least_changes: int, tmp_path: Path, small_python: Path
) -> None:
    command = [
        sys.executable,
        killed_installer.__file__,
        str(tmp_path / "work"),
        str(small_python),
        str(distance),
        case,
    ]
    (tmp_path / "work").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[case]["different"] == {}
    assert found[case]["changes"] >= least_changes
