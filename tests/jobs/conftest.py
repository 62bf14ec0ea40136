# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quick_order import QuickOrder, quick_order
from slurm_client import SETTINGS, Client, wait_until
from slurm_cluster import SlurmCluster

from llmb.catalogue.catalogue import Catalogue, job_defaults
from llmb.jobs.history import open_history
from llmb.jobs.job import Job
from llmb.jobs.order import Order
from llmb.jobs.store import Store
from llmb.jobs.submit import submit_order
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.scheduler_lookup import read_cluster_site
from llmb.runs.plan import Plan

Submit = Callable[..., Job]


@pytest.fixture
def client(slurm: SlurmCluster, tmp_path: Path, forked_python: str) -> Iterator[Client]:
    install = tmp_path / "install"
    install.mkdir()
    (install / "cluster_config.yaml").write_text(SETTINGS)
    yield Client(slurm, install, forked_python)
    slurm.run("scancel", f"--user={os.geteuid()}")
    wait_until(lambda: not slurm.run("squeue", "-h").stdout.strip(), "an empty queue")


@pytest.fixture
def shell(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """What this process calls speaks to the test cluster, too."""
    for name, value in client.cluster.environ.items():
        monkeypatch.setenv(name, value)
    return client


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(shell: Client, said: list[str]) -> Iterator[Store]:
    with open_history(shell.install, said.append) as opened:
        yield opened


@pytest.fixture
def order(shell: Client, tiny_plan: Callable[..., Plan], tmp_path: Path) -> Callable[..., QuickOrder]:
    """Orders of ten steps, with a line of shell in place of the workers."""
    catalogue, plan = Catalogue(), tiny_plan(scale=1, steps=10)
    site = read_cluster_site(catalogue, shell.install, shell.cluster.environ)
    options = JobOptions(python=shell.python)
    template = Order(plan=plan, defaults=job_defaults(catalogue, plan.recipe), options=options, site=site)
    return lambda line, **changes: quick_order(template, line, tmp_path, **changes)


@pytest.fixture
def submit(store: Store, shell: Client, order: Callable[..., QuickOrder]) -> Submit:
    """Submits a line of shell under a key, which is 'a' where none is given."""

    def submitter(line: str, key: str = "a", **changes: object) -> Job:
        submit_order(store, order(line, **changes), shell.cluster.environ, key=key)
        job = store.by_key(key)
        assert job
        return job

    return submitter
