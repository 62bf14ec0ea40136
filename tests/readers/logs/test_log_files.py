# SPDX-License-Identifier: Apache-2.0
"""Finding logs, and files that are no logs."""

import os
from functools import partial
from pathlib import Path

import pytest

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.readers.logs import log_files as files
from llmb.readers.logs.log_files import find_logs, parse_file


def reasons(found):
    return {file.path.name: (file.outcome.status, file.outcome.reason) for file in found.refused}


def test_logs_are_found_below_largest_first(tmp_path):
    for name, size in (("b.out", 1), ("sub/deep/a.out", 3), ("sub/c.out", 1), ("sub/d.txt", 9), ("log.out.gz", 9)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    found = find_logs(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found.logs] == [
        "log.out.gz",
        "sub/deep/a.out",
        "b.out",
        "sub/c.out",
    ]
    assert found.total_bytes == 14
    assert found.refused == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sbatch_acct.pretrain_llama3.1_8b_bf16_8_123.out", "not_training_log"),
        ("sbatch_acct.pretrain_llama3.1_8b_bf16_8_nsys_123.out", "not_training_log"),
        ("vboost_1.out", "not_training_log"),
        ("log-acct.pretrain_llama3.1_8b_bf16_8_nccltrace_12_0.out", "traced"),
        ("log-acct.pretrain_llama3.1_8b_bf16_8_nsys_12_0.out", "profiled"),
        ("log-acct.pretrain_llama3.1_8b_bf16_8_torchprofile.out", "profiled"),
        ("prepare_squad_dataset_exp_1.out", "not_training_log"),
        ("log-acct.import_ckpt_exp_1_0.out", "not_training_log"),
        ("nsys_analysis.out", "not_training_log"),
    ],
)
def test_what_is_no_measurement_by_its_name_is_not_read(tmp_path, name, expected):
    (tmp_path / name).touch()
    found = find_logs(tmp_path)
    assert found.logs == ()
    status, reason = reasons(found)[name]
    assert status == expected
    assert reason
    assert find_logs(tmp_path / name).logs == (tmp_path / name,), "asked for by name, it is read"


def test_what_cannot_be_read_is_listed(tmp_path):
    (tmp_path / "folder.out").mkdir()
    (tmp_path / "folder.out" / "inner.out").touch()
    (tmp_path / "dangling.out").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.out").symlink_to("loop.out")
    os.mkfifo(tmp_path / "pipe.out")
    (tmp_path / "link.out").symlink_to(tmp_path / "folder.out" / "inner.out")
    found = find_logs(tmp_path)
    assert {path.name for path in found.logs} == {"inner.out", "link.out"}
    assert reasons(found) == {
        "folder.out": ("unreadable", "it is a directory"),
        "dangling.out": ("unreadable", "it is a dangling link"),
        "loop.out": ("unreadable", "it is a dangling link"),
        "pipe.out": ("unreadable", "it is not a regular file"),
    }


def test_a_directory_that_cannot_be_listed_is_listed(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.out").touch()
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert reasons(find_logs(tmp_path)) == {"closed": ("unreadable", "the folder cannot be listed: Permission denied")}


def test_a_file_that_vanished_is_unreadable(tmp_path):
    outcome = parse_file(tmp_path / "gone.out", "reference").outcome
    assert (outcome.status, outcome.reason) == ("unreadable", "the file cannot be read: No such file or directory")


def test_a_file_that_vanishes_while_logs_are_looked_for_is_listed(tmp_path, monkeypatch):
    (tmp_path / "a.out").touch()
    monkeypatch.setattr(files, "_walk", lambda root, _: [f"{root}/a.out", f"{root}/gone.out"])
    found = find_logs(tmp_path)
    assert found.logs == (tmp_path / "a.out",)
    assert reasons(found) == {"gone.out": ("unreadable", "No such file or directory")}


def test_a_missing_path_and_a_directory_without_logs_are_errors(tmp_path):
    with pytest.raises(UsageError, match="no such file or directory"):
        find_logs(tmp_path / "nowhere")
    (tmp_path / "readme.txt").touch()
    with pytest.raises(UsageError, match=r"no '\*\.out' file in or below"):
        find_logs(tmp_path)


def test_batches_hold_every_file_once_and_spread_the_large_ones():
    paths = [Path(str(number)) for number in range(1000)]
    batches = files._batches(paths, 4)
    assert sorted(path for batch in batches for path in batch) == sorted(paths)
    assert [batch[0] for batch in batches] == paths[: len(batches)]
    assert len(files._batches(paths[:3], 64)) == 3


def test_a_killed_worker_is_told(tmp_path, monkeypatch):
    for number in range(600):
        (tmp_path / f"{number}.out").touch()
    monkeypatch.setattr(files, "_begin_worker", partial(os._exit, 1))
    with pytest.raises(EnvironmentProblem, match="a process that was reading logs was killed"):
        list(files.parse_logs(find_logs(tmp_path), "reference", 2))
