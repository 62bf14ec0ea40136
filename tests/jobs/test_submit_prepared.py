# SPDX-License-Identifier: Apache-2.0
"""What a job needs is written before it is queued, and gone if it is rejected."""

from pathlib import Path

import pytest

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.campaigns.proposal import job_request
from llmb.jobs.order import Order, make_order, prepare, removed_if_refused
from llmb.launch.site.site import Site

CATALOGUE = Catalogue()
TINY = {"workload": "pretrain_llama3.1", "size": "tiny", "gpu_type": "cpu", "scale": 1, "save_checkpoint": True}


def order(install: Path, saved: Path, **values: object) -> Order:
    site = Site(install=install, shell={})
    wanted = job_request(site, {**TINY, "checkpoint_dir": str(saved), **values}, {})
    return make_order(CATALOGUE, wanted.request, wanted.choices, wanted.options, site)


def test_a_rejected_job_leaves_no_folders(tmp_path: Path) -> None:
    made = order(tmp_path / "root", tmp_path / "saved")
    prepared = prepare(made)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [prepared.folder.path.parent.name]
    with pytest.raises(UsageError), removed_if_refused(prepared.folder, made.plan):
        raise UsageError("rejected")
    assert list((tmp_path / "saved").iterdir()) == []
    assert not prepared.folder.path.exists()


def test_a_job_that_could_not_save_is_not_queued(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="checkpoints cannot be saved there: it is a file"):
        prepare(order(tmp_path / "root", tmp_path / "file"))
    assert not list((tmp_path / "root").rglob("run.json"))
