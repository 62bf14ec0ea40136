# SPDX-License-Identifier: Apache-2.0
"""Folders and files of a run."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_steps import step_of
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.runs import experiment
from llmb.runs import folder as folders
from llmb.runs.experiment import create_run_folder
from llmb.runs.folder import BrokenRecord, InstallRoot, chosen_root, install_root, read_stored, write_atomically
from llmb.runs.plan import Plan
from llmb.runs.record import JobEnd
from llmb.runs.steps import Step, read_steps, step_from_json, step_to_json


def step(number: int = 0, **changes: object) -> Step:
    return step_of(number, **{"step_time_s": 0.1, "rank_step_time_s_min": 0.09, "slowest_rank": 1, **changes})


def test_two_runs_in_the_same_second_get_folders_of_their_own(
    tmp_path: Path, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment.time, "time", lambda: 1_700_000_000.7)
    made = [create_run_folder(tmp_path, tiny_plan()).path for _ in range(3)]
    assert len(set(made)) == 3
    assert [path.parent.name.rsplit("_", 1)[1] for path in made] == ["1700000000", "1700000000-2", "1700000000-3"]
    assert all(path.is_dir() for path in made)


def test_a_folder_that_cannot_be_made_is_an_environment_problem(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="Not a directory") as caught:
        create_run_folder(tmp_path / "file", tiny_plan())
    assert caught.value.exit_code == 3
    assert str(tmp_path / "file") in str(caught.value)


def test_the_install_root_is_the_variable_then_the_cluster_then_home(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster"
    deep = cluster / "a" / "b"
    deep.mkdir(parents=True)
    assert install_root({"HOME": "/home/me"}, deep) == Path("/home/me/.llmb")
    (cluster / "cluster_config.yaml").write_text("")
    assert install_root({"HOME": "/home/me"}, deep) == cluster
    assert install_root({"HOME": "/home/me", "LLMB_INSTALL": "/data"}, deep) == Path("/data")


def test_the_older_variable_is_the_install_root_too_and_who_chose_it_is_known(tmp_path: Path) -> None:
    home = {"HOME": "/home/me"}
    assert chosen_root(home, tmp_path) == InstallRoot(Path("/home/me/.llmb"), None)
    assert chosen_root({**home, "STAGE_PATH": "/lustre/stage"}, tmp_path) == InstallRoot(
        Path("/lustre/stage"), "STAGE_PATH"
    )
    assert chosen_root({"STAGE_PATH": "/a", "LLMB_INSTALL": " "}, tmp_path).path == Path("/a")
    assert chosen_root({"STAGE_PATH": "/a", "LLMB_INSTALL": "/a/"}, tmp_path) == InstallRoot(Path("/a"), "LLMB_INSTALL")
    (tmp_path / "cluster_config.yaml").write_text("")
    assert chosen_root(home, tmp_path) == InstallRoot(tmp_path, "cluster_config.yaml")
    with pytest.raises(UsageError, match="LLMB_INSTALL is '/b', but STAGE_PATH is '/a'") as caught:
        chosen_root({"STAGE_PATH": "/a", "LLMB_INSTALL": "/b"}, tmp_path)
    assert caught.value.do == "unset one of them"


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, "old")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(loss=numbers, grad_norm=numbers, time=st.floats(min_value=0, max_value=1e6), profiled=st.booleans())
def test_a_step_survives_its_line_bit_by_bit(loss: float, grad_norm: float, time: float, profiled: bool) -> None:
    written = step(loss=loss, grad_norm=grad_norm, step_time_s=time, profiled=profiled)
    line = step_to_json(written)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    read = step_from_json(line)
    assert (read.step_time_s, read.profiled) == (time, profiled)
    for before, after in ((loss, read.loss), (grad_norm, read.grad_norm)):
        assert before == after or (math.isnan(before) and math.isnan(after))
    assert read.finite == (math.isfinite(loss) and math.isfinite(grad_norm))


@pytest.mark.parametrize("cut", [1, 10, 50])
def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [step_to_json(step(number)) for number in range(3)]
    path.write_text("\n".join(lines)[:-cut])
    assert [item.step for item in read_steps(path)] == [0, 1]


def test_no_steps_are_no_steps(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("line", ["", "{}", "[1]", "nonsense", '{"step": "two"}', "\xff", "[" * 100_000])
def test_a_damaged_line_among_steps_is_named(tmp_path: Path, line: str) -> None:
    """The steps after it would be lost without a word."""
    path = tmp_path / "metrics.jsonl"
    whole = step_to_json(step())
    path.write_text(f"{whole}\n{line}\n{whole}\n", encoding="latin-1")
    with pytest.raises(EnvironmentProblem, match="damaged or incomplete") as raised:
        read_steps(path)
    assert raised.value.where == f"{path}:2"
    assert isinstance(raised.value, ValueError)
    path.write_text(f"{whole}\n{line}", encoding="latin-1")
    assert read_steps(path) == [step()]


def test_a_damaged_record_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "job_end.json"
    path.write_text('{"exit_code": 1,\n "ended_at"')
    with pytest.raises(BrokenRecord, match=r"it is damaged: Invalid JSON: .* line 2") as raised:
        read_stored(path, JobEnd)
    assert raised.value.where == str(path)
    with pytest.raises(FileNotFoundError):
        read_stored(tmp_path / "missing.json", JobEnd)
