# SPDX-License-Identifier: Apache-2.0
"""What a rank asks of NCCL, in a process of its own: NCCL itself, which needs a GPU, reads the variables once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.engine.nccl_request import ask_for_nccl_log, ask_for_topology
from llmb.readers.samples.host import Device
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan, make_plan

NAMES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
FIRST = {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
"""The first rank of the second of two nodes."""
ASKING = f"""
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from llmb.engine.nccl_request import ask_for_nccl_log, keep_network_lines
from llmb.runs.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
own = ask_for_nccl_log(SimpleNamespace(device="cuda", nccl_trace="trace" in sys.argv), folder)
if own:
    own.write_text(Path(sys.argv[1], "said").read_text())
keep_network_lines(own, folder)
print(json.dumps([[os.environ.get(name) for name in {NAMES}], str(own) if own else None, os.getpid()]))
"""


def plan(device: Device = "cuda") -> Plan:
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=8)
    return make_plan(resolve(Catalogue(), request), Choices(), device=device)


def asked(folder: Path, *words: str, **variables: str) -> tuple[list[str | None], str | None, int]:
    """The variables of NCCL as a rank leaves them, the user's own file, and the process."""
    environ = {"PATH": "/usr/bin", "HOME": str(folder), "PYTHONPATH": ":".join(sys.path), **FIRST, **variables}
    done = subprocess.run(
        [sys.executable, "-c", ASKING, str(folder), *words], env=environ, capture_output=True, text=True, check=True
    )
    variables_now, own, process = json.loads(done.stdout)
    return variables_now, own, process


def test_the_first_rank_of_a_node_lets_nccl_say_which_network_it_uses(tmp_path: Path) -> None:
    folder = tmp_path / "100 % done"
    folder.mkdir()
    # NCCL takes % for the start of a place holder, such as %h for the host.
    log = f"{tmp_path}/100 %% done/nccl_network/rank-8.log"
    assert asked(folder)[:2] == (["INFO", "INIT,NET", log], None)
    assert (folder / "nccl_network").is_dir()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NCCL_DEBUG": ""}, ("INFO", "INIT,NET")),
        ({"NCCL_DEBUG": "nonsense"}, ("INFO", "INIT,NET")),
        ({"NCCL_DEBUG_FILE": "/tmp/unused", "NCCL_DEBUG_SUBSYS": "COLL"}, ("INFO", "INIT,NET")),
    ],
)
def test_variables_without_a_level_ask_for_nothing(
    tmp_path: Path, variables: dict[str, str], expected: tuple[str, str]
) -> None:
    now, own, _ = asked(tmp_path, **variables)
    assert (*now, own) == (*expected, str(tmp_path / "nccl_network/rank-8.log"), None)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NCCL_DEBUG": "WARN"}, ["INFO", "INIT,NET", None]),
        ({"NCCL_DEBUG": "version", "NCCL_DEBUG_FILE": "/tmp/unused"}, ["INFO", "INIT,NET", ""]),
        ({"NCCL_DEBUG": "INFO"}, ["INFO", "INIT,BOOTSTRAP,ENV,NET", None]),
        ({"NCCL_DEBUG": "info", "NCCL_DEBUG_SUBSYS": "coll,net"}, ["info", "coll,net,INIT", None]),
        ({"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "ALL"}, ["TRACE", "ALL", None]),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^NET,COLL"}, ["INFO", "^COLL", None]),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^init"}, ["INFO", "ALL", None]),
    ],
)
def test_whoever_asks_himself_loses_nothing(
    tmp_path: Path, variables: dict[str, str], expected: list[str | None]
) -> None:
    assert asked(tmp_path, **variables)[:2] == (expected, None)
    assert not any(tmp_path.iterdir())


def test_what_is_needed_is_copied_from_the_file_that_the_user_chose(tmp_path: Path) -> None:
    said = "n:1:2 [0] NCCL INFO Using network IB\n"
    call = "n:1:2 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1\n"
    (tmp_path / "said").write_text(said + call)
    now, own, process = asked(tmp_path, NCCL_DEBUG="WARN", NCCL_DEBUG_FILE=f"{tmp_path}/%%mine.%p")
    assert now == ["INFO", "INIT,NET", f"{tmp_path}/%%mine.%p"]
    assert own == f"{tmp_path}/%mine.{process}"
    assert (tmp_path / "nccl_network/rank-8.log").read_text() == said
    assert Path(own).read_text() == said + call


def test_configuration_files_of_nccl_count_like_variables(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("# of the cluster\nNCCL_DEBUG=INFO\nNCCL_DEBUG_SUBSYS=COLL\n")
    assert asked(tmp_path)[0] == [None, "COLL,INIT,NET", None]
    (tmp_path / "other").write_text("NCCL_DEBUG=WARN\n")
    assert asked(tmp_path, NCCL_CONF_FILE=str(tmp_path / "other"))[0] == ["INFO", "INIT,NET", None]


def test_a_trace_of_nccl_has_the_network_too(tmp_path: Path) -> None:
    log = str(tmp_path / "nccl_trace/rank-8.log")
    assert asked(tmp_path, "trace")[0] == ["INFO", "INIT,COLL,NET", log]
    assert asked(tmp_path, "trace", NCCL_DEBUG_SUBSYS="INIT,COLL,P2P")[0] == ["INFO", "INIT,COLL,P2P,NET", log]
    assert asked(tmp_path, "trace", LOCAL_RANK="1")[0][1] == "INIT,COLL"


@pytest.mark.parametrize(
    "other", [{"LOCAL_RANK": "1"}, {"WORLD_SIZE": "8"}, {"WORLD_SIZE": ""}], ids=["another rank", "one node", "unset"]
)
def test_others_ask_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]) -> None:
    for name, value in (FIRST | other).items():
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    assert ask_for_nccl_log(plan(), RunFolder(tmp_path)) is None
    assert not any(tmp_path.iterdir())


def test_ranks_on_a_cpu_ask_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FIRST.items():
        monkeypatch.setenv(name, value)
    ask_for_nccl_log(plan("cpu"), RunFolder(tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("device", "variables", "expected"),
    [
        ("cuda", {"RANK": "0"}, "nccl_topology.xml"),
        ("cuda", {"RANK": "1"}, None),
        ("cuda", {"RANK": "0", "NCCL_TOPO_DUMP_FILE": "mine.xml"}, "mine.xml"),
        ("cpu", {"RANK": "0"}, None),
    ],
)
def test_one_process_on_gpus_writes_the_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device, variables: dict[str, str], expected: str | None
) -> None:
    for name, value in {"NCCL_TOPO_DUMP_FILE": "", **variables}.items():
        monkeypatch.setenv(name, value)
    ask_for_topology(plan(device), RunFolder(tmp_path))
    assert Path(os.environ["NCCL_TOPO_DUMP_FILE"]).name == (expected or "")
