# SPDX-License-Identifier: Apache-2.0
import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import slurm_accounts
from called_here import Run, program_runner, runner
from fork_server import ForkServer
from slurm_cluster import HOW_TO_GET, SlurmCluster, missing_programs

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.runs.choices import Choices
from llmb.runs.plan import Plan, make_plan

pytest_plugins = ["marked_secrets"]

hypothesis.settings.register_profile(
    "any machine", deadline=None, max_examples=50, derandomize=not os.environ.get("LLMB_MUTATIONS")
)  # how long an example takes depends on the machine
hypothesis.settings.load_profile("any machine")

# Whoever runs the tests may have defaults of their own. Chromium and matplotlib write there.
os.environ.pop("LLMB_CATALOGUE", None)
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="llmb-tests-config-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of many processes on few cores wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

OUTSIDE = dict(os.environ)
"""The variables of whoever runs the tests."""
GROUPS = {"slurm_with_accounts": "accounts", "slurm": "slurm"}
"""Fixtures that start a cluster: tests with the same one run in one process, or each process would start its own."""
LONGEST = (
    "slurm jobs",
    "slurm",
    "accounts",
    "tests/engine/test_account.py",
    "tests/engine/test_parallel_layouts.py",
    "tests/prediction/test_memory_random_layouts.py",
    "tests/end_to_end/test_run_on_pretended_gpus.py",
    "tests/engine/test_precision_training.py",
    "tests/jobs/test_task_pairwise.py",
    "tests/end_to_end/training",
    "tests/reports/page/test_page_browser.py",
    "tests/end_to_end/test_prepared_finetuning.py",
    "tests/benchmarks/test_engine_comparison.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays to the end: looking for garbage among it takes seconds, then and later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes run the tests: what shares a fixture goes together, and what takes longest goes first.

    Tests of ``end_to_end/training`` share only the finished runs, which all processes find; any process takes any.
    Those of ``jobs`` have a Slurm of their own, as they wait for half of all the time that tests on Slurm take.
    """
    for item in items:
        if item.get_closest_marker("gpu"):  # what others warn of on a GPU is listed: nobody has seen all of it
            item.add_marker(pytest.mark.filterwarnings("default", "error:::llmb"), append=False)
    if config.getoption("dist", "no") == "no" and "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_place)


def _group(item: pytest.Item) -> str:
    file, fixtures = item.nodeid.partition("::")[0], getattr(item, "fixturenames", ())
    cluster = next((group for fixture, group in GROUPS.items() if fixture in fixtures), None)
    if cluster:
        return "slurm jobs" if cluster == "slurm" and file.startswith("tests/jobs/test_") else cluster
    alone = file.startswith("tests/end_to_end/training/test_") and "checkpoint" not in fixtures
    return item.nodeid if alone else file


def _place(item: pytest.Item) -> int:
    (group,) = (mark.args[0] for mark in item.iter_markers("xdist_group"))
    return next((place for place, name in enumerate(LONGEST) if group.startswith(name)), len(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What torch draws is the same in every run: a sum in another order, equal for nearly all values, is not for some.

    ``LLMB_SEED`` draws others.
    """
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int(os.environ.get("LLMB_SEED", "0")))


@pytest.fixture(scope="session")
def needs() -> Callable[[str, bool, str], None]:
    """Skips a test that needs what is not there; fails it when LLMB_REQUIRE lists the need (comma separated)."""

    def check(name: str, present: bool, why: str) -> None:
        if present:
            return
        if name in os.environ.get("LLMB_REQUIRE", "").split(","):
            pytest.fail(f"LLMB_REQUIRE lists {name}: {why}")
        pytest.skip(f"needs {name}: {why}")

    return check


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a program, by its name and its shell script, before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def llmb(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Calls ``llmb`` in this process; the install root is the fixture ``install``, or ``tmp_path``."""
    try:
        install = request.getfixturevalue("install")
    except pytest.FixtureLookupError:
        install = None
    return runner(tmp_path, install or tmp_path, OUTSIDE)


@pytest.fixture(scope="session")
def llmb_program(forked_python: str) -> Run:
    """Calls ``llmb`` as a program that need not load torch."""
    return program_runner(forked_python)


@pytest.fixture(scope="session")
def tiny_plan() -> Callable[..., Plan]:
    """Plans of ``tiny`` models, or of the size that follows the workload's name, on CPU processes."""
    catalogue = Catalogue()

    def plan(workload: str = "pretrain_llama3.1", scale: int = 2, steps: int = 50, **options: object) -> Plan:
        overrides = Overrides(**options.pop("overrides", {}))
        dtype = options.pop("dtype", None)
        name, _, size = workload.partition(" ")
        sizes = {"size": size or "tiny", "gpu_type": "cpu", "scale": scale, "dtype": dtype}
        request = Request(workload=name, **sizes, overrides=overrides)
        checkpoint = options.pop("checkpoint", None)
        choices = Choices(steps=steps, **options)
        return make_plan(resolve(catalogue, request), choices, device="cpu", checkpoint=checkpoint)

    return plan


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Processes of pytest-xdist fork from one server; a socket's path has to be shorter than ``tmp_path``'s."""
    if not hasattr(node.config, "fork_server_folder"):
        folder = tempfile.TemporaryDirectory()
        node.config.add_cleanup(folder.cleanup)
        node.config.fork_server_folder = folder.name
    node.workerinput["fork_server_folder"] = node.config.fork_server_folder


@pytest.fixture(scope="session")
def fork_server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    with tempfile.TemporaryDirectory() as own:
        shared = getattr(request.config, "workerinput", {}).get("fork_server_folder")
        server = ForkServer(Path(shared or own))
        yield server
        server.stop()


@pytest.fixture(scope="session")
def forked_python(fork_server: ForkServer) -> str:
    """What is called like the interpreter and need not load torch."""
    return str(fork_server.python)


@pytest.fixture
def forked_programs(forked_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of llmb that this process starts, such as what counts a rank, need not load torch."""
    monkeypatch.setattr(sys, "executable", forked_python)


@pytest.fixture(scope="session")
def slurm(needs: Callable[[str, bool, str], None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A running Slurm of this test process's own."""
    needs("slurm", not missing_programs(), HOW_TO_GET)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(autouse=True)
def live_nodes(request: pytest.FixtureRequest) -> None:
    """A node that crashed in one test is there for the next one."""
    cluster = request.getfixturevalue("slurm") if "slurm" in request.fixturenames else None
    if isinstance(cluster, SlurmCluster):
        cluster.revive()


@pytest.fixture(scope="module")
def slurm_with_accounts(
    needs: Callable[[str, bool, str], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[slurm_accounts.ClusterWithAccounts]:
    """A running Slurm that keeps accounts, and soon forgets jobs that have ended."""
    needs("slurm", not missing_programs(), HOW_TO_GET)
    needs("slurmdbd", not slurm_accounts.missing_programs(), slurm_accounts.HOW_TO_GET)
    cluster = slurm_accounts.ClusterWithAccounts(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Interrupts are honored in this process and what it starts, though it be started where they are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def small_disk(tmp_path: Path, needs: Callable[..., None]) -> Callable[[str], list[str]]:
    """Makes a command prefix that runs what follows with a file system of a given size at ``tmp_path``/disk.

    The file system is gone when the command ends; what was on it is then in ``tmp_path``/kept.
    """
    probe = ["unshare", "--mount", "--map-root-user", "sh", "-c", 'mount -t tmpfs tmpfs "$0"', str(tmp_path)]
    possible = shutil.which("unshare") is not None and subprocess.run(probe, check=False).returncode == 0
    needs("mount", possible, "unshare (util-linux) must be allowed to mount a small file system")

    def prefix(size: str) -> list[str]:
        (tmp_path / "disk").mkdir()
        mount = f'mount -t tmpfs -o size={size} tmpfs "$0/disk" || exit 99'
        script = f'{mount}; "$@" & trap "kill $!" TERM; wait $!; code=$?; cp -r "$0/disk" "$0/kept"; exit $code'
        return ["unshare", "--mount", "--map-root-user", "sh", "-c", script, str(tmp_path)]

    return prefix
