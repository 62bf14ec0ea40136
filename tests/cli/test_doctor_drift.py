# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor --against``: a run of this machine, one that was changed, and one of another node."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from recorded_node import RecordedNode
from recorded_runs import gpu_record, times_around, write_run

from llmb.cli.main import app, exit_code_of
from llmb.nodes.doctor.node import settings_here
from llmb.readers.samples.host import host_name
from llmb.readers.samples.node_settings import NodeSettings, together
from llmb.reports.doctor_report import DriftReport, drift_tables
from llmb.reports.table import plain_lines
from llmb.runs.conditions import Drift


@pytest.fixture(autouse=True)
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    return tmp_path


def called(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    code = exit_code_of(app, ["doctor", "--json", *options])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def run_with(install: Path, name: str, values: dict[str, str], node: str) -> str:
    """The folder of a run of ``node`` with settings."""
    settings = together({node: NodeSettings(values=values, missing={})})
    record = gpu_record(scale=8, nodes=(node,)).model_copy(update={"settings": settings})
    return str(write_run(install / name, record, times_around(10.0)))


def test_this_machine_has_no_drift_until_it_is_changed(
    install: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = settings_here(install, os.environ).values
    code, found, err = called(capsys, "--against", run_with(install, "fast", here, host_name()), "--fail-on-drift")
    assert (code, found["drift"], found["nodes"], found["not_read"]) == (0, [], [host_name()], {}), err
    slow = run_with(
        install, "slow", {**here, "sysctl.vm.swappiness": "0", "sysctl.vm.overcommit_memory": "7"}, host_name()
    )
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    code, found, err = called(capsys, "--against", slow, "--fail-on-drift")
    assert code == 4
    assert f"important settings changed since {found['against']}: sysctl.vm.swappiness, variables.NCCL_ALGO" in err
    keys = [(one["key"], one["important"]) for one in found["drift"]]
    assert keys == [
        ("sysctl.vm.swappiness", True),
        ("variables.NCCL_ALGO", True),
        ("sysctl.vm.overcommit_memory", False),
    ]
    assert called(capsys, "--against", slow)[0] == 0, "without --fail-on-drift"


def test_another_node_is_compared_with_what_is_usual_in_a_run(
    install: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = settings_here(install, {}).values | {"kernel.release": "5.4", "variables.NCCL_NVLS_ENABLE": "0"}
    code, found, err = called(capsys, "--against", run_with(install, "runs", now, "gone"), "--fail-on-drift")
    assert (code, found["unknown_nodes"]) == (4, [host_name()]), err
    assert [one["key"] for one in found["drift"]] == ["kernel.release"], "its recipe may have set the variable"
    plain = write_run(install / "others", gpu_record(scale=8), times_around(10.0))
    code, _, err = called(capsys, "--against", str(plain))
    assert (code, "recorded the settings of its nodes" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--against", "nowhere"), "nowhere"),
        (("--against", "a", "--only", "gpu"), "--against cannot be combined with --only"),
        (("--fail-on-drift",), "--fail-on-drift requires --against"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], what: str) -> None:
    code, _, err = called(capsys, *options)
    assert (code, what in err) == (2, True), err


def test_settings_of_gpus_and_of_the_image_are_read(install: Path, tmp_path: Path) -> None:
    node = RecordedNode(tmp_path / "node")
    node.gpus[3]["power.limit"] = "500.00"
    image = tmp_path / "nemo.sqsh"
    (install / "cluster_config.yaml").write_text(f"container: {{runtime: pyxis, image: {image}}}\n")
    found = settings_here(install, {}, node.source).values
    assert found["hardware.power_limit_w"] == "500, 700"
    assert found["hardware.persistence_mode"] == "Enabled"
    assert found["software.image"] == str(image)


def test_the_table_has_equal_changes_of_nodes_in_a_row_and_fits_80_columns() -> None:
    nodes = [f"node{number}" for number in range(1, 4)]
    values = {"key": "sysctl.net.ipv4.tcp_congestion_control", "before": "bbr", "after": "cubic", "important": True}
    report = DriftReport(
        against="run fast",
        saved_at="2026-11-20T00:00:00+00:00",
        nodes=tuple(nodes),
        unknown_nodes=("node3",),
        not_read={"node4": "down"},
        missing={},
        drift=tuple(Drift(node=node, **values) for node in nodes),
    )
    lines = [line for table in drift_tables(report, ",".join) for line in plain_lines(table)]
    assert lines[2].split() == ["sysctl.net.ipv4.tcp_congestion_control", "bbr", "cubic", "node1,node2,node3"]
    assert "node3: not in run fast, so compared with the most common values" in lines
    assert "node4 was not read: down" in lines
    assert max(map(len, lines[:3])) <= 80
