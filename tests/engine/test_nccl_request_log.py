# SPDX-License-Identifier: Apache-2.0
"""What a rank asks of NCCL, and what it notes beside NCCL's log; NCCL itself needs a GPU."""

import os
from pathlib import Path

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.engine.nccl_request import ask_for_nccl_log
from llmb.engine.profile import NcclTrace
from llmb.readers.nccl.nccl_log import read_nccl_logs
from llmb.readers.nccl.nccl_summary import Codes, summarize_nccl
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan, make_plan
from llmb.runs.profiling import Profiling
from llmb.runs.trace_reports import nccl_log

VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


def plan(*, nccl_trace: bool) -> Plan:
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=8)
    choices = Choices(profiling=Profiling(nccl_trace=nccl_trace))
    return make_plan(resolve(Catalogue(), request), choices, device="cuda")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3; what the test sets is undone."""
    monkeypatch.setenv("RANK", "3")
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_nccl_is_asked_for_a_log_of_each_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "100 % done" / "run")
    folder.path.mkdir(parents=True)
    ask_for_nccl_log(plan(nccl_trace=True), folder)
    asked = [os.environ[name] for name in VARIABLES]
    # NCCL takes % for the start of a place holder, such as %h for the host.
    assert asked == ["INFO", "INIT,COLL", f"{tmp_path}/100 %% done/run/nccl_trace/rank-3.log"]
    assert folder.nccl_trace.is_dir()


def test_the_user_may_ask_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "INIT,COLL,P2P,NET")
    ask_for_nccl_log(plan(nccl_trace=True), RunFolder(tmp_path))
    assert os.environ["NCCL_DEBUG_SUBSYS"] == "INIT,COLL,P2P,NET"


def test_other_runs_ask_for_nothing(tmp_path: Path) -> None:
    ask_for_nccl_log(plan(nccl_trace=False), RunFolder(tmp_path))
    assert not any(name in os.environ for name in VARIABLES)
    assert not any(tmp_path.iterdir())


def test_a_rank_notes_where_its_steps_begin_and_end(tmp_path: Path) -> None:
    log = nccl_log(RunFolder(tmp_path), 3)
    log.parent.mkdir()
    notes = NcclTrace(log)
    line = (
        "node:1:2 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 4 datatype 7 op 0 root 0 comm 0x3"
        " [nranks=8] stream 0x4\n"
    )
    with notes.step(0):  # which opens NCCL's log
        log.write_text(line)
    for step in (1, 2):
        with notes.step(step), log.open("a") as stream:
            stream.write(line * (step + 1))
        with log.open("a") as stream:
            stream.write(line * 7)  # a checkpoint
    summary = summarize_nccl(read_nccl_logs([log]), Codes())
    assert [(step.step, step.calls) for step in summary.steps] == [(0, 1), (1, 2), (2, 3)]
    assert summary.calls == 20
