# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor --save`` and ``--against``: of this machine, of a run that it made, and of one that was changed."""

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_node import RecordedNode
from recorded_runs import gpu_record, times_around, write_run

from llmb.cli.main import app, exit_code_of
from llmb.health.snapshots import SNAPSHOTS, Snapshot, settings_here
from llmb.report.doctor_report import DriftReport, drift_tables
from llmb.report.table import plain_lines
from llmb.resources.node_settings import NodeSettings, together
from llmb.runs.drift import Drift
from llmb.runs.host import host_name


@pytest.fixture(autouse=True)
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    return tmp_path


def called(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    code = exit_code_of(app, ["doctor", "--json", *options])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def changed(install: Path, name: str, **values: str) -> None:
    """A snapshot of this machine, as it was with other settings."""
    path = install / SNAPSHOTS / "fast.json"
    snapshot = Snapshot.model_validate_json(path.read_text())
    settings = snapshot.settings.model_copy(update={"usual": {**snapshot.settings.usual, **values}})
    text = snapshot.model_copy(update={"name": name, "settings": settings}).model_dump_json()
    (path.parent / f"{name}.json").write_text(text)


def test_this_machine_has_no_drift_until_it_is_changed(
    install: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, saved, err = called(capsys, "--save", "fast")
    assert (code, saved["nodes"], saved["not_read"]) == (0, [host_name()], {}), err
    code, _, err = called(capsys, "--save", "fast")
    assert (code, "there is a snapshot 'fast'" in err) == (2, True)
    assert called(capsys, "--save", "fast", "--force")[0] == 0
    code, found, err = called(capsys, "--against", "fast", "--fail-on-drift")
    assert (code, found["drift"], found["against"]) == (0, [], "snapshot fast"), err
    changed(install, "slow", **{"sysctl.vm.swappiness": "0", "sysctl.vm.overcommit_memory": "7"})
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    code, found, err = called(capsys, "--against", "slow", "--fail-on-drift")
    assert code == 4
    assert "settings have changed since snapshot slow: sysctl.vm.swappiness, variables.NCCL_ALGO" in err
    keys = [(one["key"], one["important"]) for one in found["drift"]]
    assert keys == [
        ("sysctl.vm.swappiness", True),
        ("variables.NCCL_ALGO", True),
        ("sysctl.vm.overcommit_memory", False),
    ]
    assert called(capsys, "--against", "slow")[0] == 0, "without --fail-on-drift"


def test_a_run_is_what_its_record_says(install: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = settings_here(install, {})
    now = here.values | {"kernel.release": "5.4", "variables.NCCL_NVLS_ENABLE": "0"}
    settings = together({"gone": NodeSettings(values=now, missing={})})
    record = gpu_record(scale=8, nodes=("gone",)).model_copy(update={"settings": settings})
    path = write_run(install / "runs", record, times_around(10.0))
    code, found, err = called(capsys, "--against", str(path), "--fail-on-drift")
    assert (code, found["unknown_nodes"]) == (4, [host_name()]), err
    assert [one["key"] for one in found["drift"]] == ["kernel.release"], "its recipe may have set the variable"
    plain = write_run(install / "others", gpu_record(scale=8), times_around(10.0))
    code, _, err = called(capsys, "--against", str(plain))
    assert (code, "has settings of its nodes" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--against", "nowhere"), "no snapshot has the name 'nowhere'"),
        (("--save", "a/b"), "'a/b' cannot be the name of a snapshot"),
        (("--save", "a", "--only", "gpu"), "--only cannot be combined with --save or --against"),
        (("--save", "a", "--against", "b"), "--save and --against cannot be combined"),
        (("--fail-on-drift",), "--fail-on-drift for --against"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], what: str) -> None:
    code, _, err = called(capsys, *options)
    assert (code, what in err) == (2, True), err


def test_settings_of_gpus_and_of_the_image_are_kept(install: Path, tmp_path: Path) -> None:
    node = RecordedNode(tmp_path / "node")
    node.gpus[3]["power.limit"] = "500.00"
    image = tmp_path / "nemo.sqsh"
    image.write_bytes(b"12")
    (install / "cluster_config.yaml").write_text(f"container: {{runtime: pyxis, image: {image}}}\n")
    found = settings_here(install, {}, node.source).values
    assert found["hardware.power_limit_w"] == "500, 700"
    assert found["hardware.persistence_mode"] == "Enabled"
    assert found["software.image"] == str(image)
    assert found["image.file"].startswith("2 bytes of ")


def test_the_table_has_equal_changes_of_nodes_in_a_row_and_fits_80_columns() -> None:
    nodes = [f"node{number}" for number in range(1, 4)]
    values = {"key": "sysctl.net.ipv4.tcp_congestion_control", "before": "bbr", "after": "cubic", "important": True}
    report = DriftReport(
        against="snapshot fast",
        saved_at="2026-11-20T00:00:00+00:00",
        nodes=tuple(nodes),
        unknown_nodes=("node3",),
        not_read={"node4": "down"},
        missing={},
        drift=tuple(Drift(node=node, **values) for node in nodes),
    )
    lines = [line for table in drift_tables(report, ",".join) for line in plain_lines(table)]
    assert lines[2].split() == ["sysctl.net.ipv4.tcp_congestion_control", "bbr", "cubic", "node1,node2,node3"]
    assert "node3: not in snapshot fast, so compared with what most of its nodes have" in lines
    assert "node4 was not read: down" in lines
    assert max(map(len, lines[:3])) <= 80
