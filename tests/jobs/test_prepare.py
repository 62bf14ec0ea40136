# SPDX-License-Identifier: Apache-2.0
"""What a job needs is written before it is queued, and gone if it is rejected."""

from pathlib import Path

import pytest

from llmb.campaigns.proposal import job_request
from llmb.catalogue.load import Catalogue
from llmb.errors import EnvironmentProblem, UsageError
from llmb.jobs.order import Order, make_order, prepare, removed_if_refused
from llmb.site.site import Site

CATALOGUE = Catalogue()
TINY = {"workload": "pretrain_llama3.1", "size": "tiny", "gpu_type": "cpu", "scale": 1, "save_checkpoint": True}


def order(install: Path, saved: Path, **values: object) -> Order:
    site = Site(install=install, shell={})
    wanted = job_request(site, {**TINY, "checkpoint_dir": str(saved), **values}, {})
    return make_order(CATALOGUE, wanted.request, wanted.choices, wanted.options, site)


def test_every_run_of_an_array_has_a_folder_for_checkpoints(tmp_path: Path) -> None:
    made = order(tmp_path / "root", tmp_path / "saved", array="0-2")
    prepared = prepare(made)
    names = sorted(folder.path.parent.name for folder in prepared.folders.values())
    assert [name.rpartition(".")[2] for name in names] == ["0", "1", "2"]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names
    with pytest.raises(UsageError), removed_if_refused(prepared.all_folders, made.plan):
        raise UsageError("rejected")
    assert list((tmp_path / "saved").iterdir()) == []
    assert not prepared.base.path.exists()


def test_a_job_that_could_not_save_is_not_queued(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="checkpoints cannot be saved there: it is a file"):
        prepare(order(tmp_path / "root", tmp_path / "file"))
    assert not list((tmp_path / "root").rglob("run.json"))
