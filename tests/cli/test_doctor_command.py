# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor`` as its users call it: on this machine, and on one whose nvidia-smi is a recording."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from called_here import Run
from recorded_node import RecordedNode
from shown_tables import shown_lines

from llmb.nodes.doctor.check_records import Check, NodeReport, NotChecked
from llmb.nodes.doctor.rules import AREAS, BETWEEN, names_of, rule_of, rules
from llmb.reports.doctor_report import doctor_document, node_tables
from llmb.reports.table import plain_lines

Program = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    monkeypatch.delenv("CHECKPOINT_DIR", raising=False)
    return tmp_path


@pytest.fixture
def doctor(llmb: Run) -> Run:
    return partial(llmb, "doctor", "--json")


@pytest.mark.slow
def test_the_whole_doctor_on_this_machine(install: Path) -> None:
    """The only test that loads torch, as the command does."""
    command = [sys.executable, "-m", "llmb.cli.main", "doctor", "--json", "--disk-size", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == (4 if document["status"] == "fail" else 0), done.stderr
    assert "Traceback" not in done.stderr
    found = [item["name"] for item in (*document["checks"], *document["not_checked"])]
    assert len({*found}) == len(found)
    assert {rule_of(name).name for name in found} >= {*rules()} - {"disk_shared", "disk_files", *names_of(BETWEEN)}
    assert all(item["value"] not in (None, "") for item in document["checks"])
    assert all((item["advice"] is None) == (item["status"] == "pass") for item in document["checks"])
    assert all(item["reason"] for item in document["not_checked"])
    software = {item["name"]: item for item in document["checks"]}["software_torch"]
    assert re.match(r"\d+\.\d+", software["value"])
    assert not [path for path in install.rglob("*") if "doctor" in path.name]


def test_all_but_software_on_this_machine(doctor: Run, install: Path) -> None:
    areas = [area for area in AREAS if area != "software"]
    done = doctor("--only", ",".join(areas), "--disk-size", "4")
    code, document, err = done.returncode, done.document, done.stderr
    assert code == (4 if document["status"] == "fail" else 0), err
    found = {rule_of(item["name"]).name for item in (*document["checks"], *document["not_checked"])}
    assert found >= {name for area in areas for name in names_of(area)} - {"disk_shared", "disk_files"}
    assert all(item["value"] not in (None, "") for item in document["checks"])
    assert [*install.iterdir()] == []


@pytest.mark.measured
def test_a_long_check_is_named_and_an_interrupt_ends_its_program(install: Path, tmp_path: Path) -> None:
    """An interpreter that hangs stands for a file server that does."""
    python, ready = tmp_path / "python", tmp_path / "pid"
    python.write_text(f"#!/bin/sh\necho $$ > {ready}.new; mv {ready}.new {ready}; exec sleep 1000\n")
    python.chmod(0o755)
    (install / "cluster_config.yaml").write_text(f"python: {python}\n")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom llmb.cli.main import main\n"
    )
    command = [sys.executable, "-c", f"{code}sys.argv[1:] = ['doctor', '--only', 'software']\nmain()"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as doctor:
        assert doctor.stderr
        lines = iter(doctor.stderr)
        assert next(line for line in lines if "checking" in line) == "llmb: checking software\n"
        end = time.monotonic() + 600
        while not ready.exists():
            assert doctor.poll() is None and time.monotonic() < end, "its program did not start"
            time.sleep(0.1)
        pid = int(ready.read_text())
        doctor.send_signal(signal.SIGINT)
        assert "llmb: error: interrupted; nothing was changed\n" in [*lines]
        assert doctor.wait(600) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_where_no_gpu_is_nothing_of_gpus_passes(program: Program, doctor: Run) -> None:
    program("nvidia-smi", "echo 'No devices were found'; exit 6")
    done = doctor("--only", "gpu")
    code, document = done.returncode, done.document
    if document["checks"]:
        pytest.skip("this machine has GPUs of NVIDIA on its PCI bus")
    assert (code, document["status"], document["checks"]) == (0, "pass", [])
    assert [item["name"] for item in document["not_checked"]] == names_of("gpu")
    assert {item["reason"] for item in document["not_checked"]} == {"no GPU: nvidia-smi: No devices were found"}


@pytest.mark.parametrize(
    ("options", "config", "by"),
    [
        (("--gpus", "8"), "", "--gpus"),
        (("--gpu-type", "H100"), "", "nodes of h100"),
        ((), "gpu_type: h100\n", "nodes of h100"),
        ((), "gpu_type: h100\nslurm: {gpus_per_node: 8}\n", "cluster_config.yaml"),
    ],
)
def test_missing_gpus_that_are_expected_fail(
    program: Program, doctor: Run, install: Path, options: tuple[str, ...], config: str, by: str
) -> None:
    program("nvidia-smi", "echo 'No devices were found'; exit 6")
    if config:
        (install / "cluster_config.yaml").write_text(config)
    done = doctor("--only", "gpu", *options)
    code, document, err = done.returncode, done.document, done.stderr
    assert (code, document["status"]) == (4, "fail")
    (check,) = document["checks"]
    assert check["value"].startswith(f"0 of 8 ({by}): nvidia-smi: No devices were found")
    assert "is not fit: 1 check fails: gpu_count" in err


def test_no_gpus_are_expected_of_a_cpu(program: Program, doctor: Run, install: Path) -> None:
    program("nvidia-smi", "echo 'No devices were found'; exit 6")
    (install / "cluster_config.yaml").write_text("gpu_type: cpu\n")
    doctor("--only", "cpu,limits", code=0)


def test_a_recorded_nvidia_smi_is_called_as_a_program(program: Program, doctor: Run, tmp_path: Path) -> None:
    """Each of its commands prints a file; one GPU has uncorrected errors."""
    node = RecordedNode(tmp_path / "node")
    node.gpus[5]["ecc.errors.uncorrected.volatile.total"] = "2"
    folder = tmp_path / "said"
    folder.mkdir()
    program("nvidia-smi", f"printf '%s\\n' \"$*\" >> {folder}/asked; cat {folder}/answer-$(wc -l < {folder}/asked)")
    asked: list[list[str]] = []

    def record(command: list[str], limit_s: float) -> Any:
        said = node.ask(command, limit_s)
        asked.append(command)
        (folder / f"answer-{len(asked)}").write_text(said.text)
        return said

    from llmb.nodes.doctor.checks.nvidia_smi import read_gpus
    from llmb.nodes.doctor.facts import FactSource

    read_gpus(FactSource(root=node.root, ask=record), "node1")
    done = doctor("--only", "gpu", "--gpu-type", "h100")
    code, document = done.returncode, done.document
    assert (folder / "asked").read_text().splitlines() == [" ".join(command[1:]) for command in asked]
    found = {item["name"]: item for item in document["checks"]}
    assert (code, found["gpu_ecc_errors"]["status"], found["gpu_ecc_errors"]["value"]) == (
        4,
        "fail",
        "uncorrected: 2 on GPU 5",
    )
    assert found["gpu_count"]["value"] == "8 of 8"


def test_only_what_is_asked_for_is_checked(doctor: Run) -> None:
    document = doctor("--only", "limits_nofile,kernel", "--only", "memory_shm").document
    found = {item["name"] for item in (*document["checks"], *document["not_checked"])}
    assert found == {"limits_nofile", "memory_shm", *names_of("kernel")}


def test_without_a_test_file_space_is_checked_all_the_same(doctor: Run, install: Path) -> None:
    document = doctor("--only", "disk", "--no-disk").document
    found = {item["name"]: item for item in document["checks"]}
    assert "free" in found["disk_space_install"]["value"]
    reasons = {item["name"]: item["reason"] for item in document["not_checked"]}
    assert reasons["disk_write_install"] == "not measured: --no-disk"
    assert [*install.iterdir()] == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--only", "gpus"), "unknown area or check 'gpus'; did you mean 'gpu'?"),
        (("--only", "nodes_clock"), "unknown area or check 'nodes_clock'"),
        (("--only", "disk_space_install"), "unknown area or check 'disk_space_install'; did you mean 'disk_space'?"),
        (("--gpu-type", "h1000"), "unknown GPU type 'h1000'; did you mean 'h100'?"),
        (("--no-disk", "--disk-size", "8"), "--no-disk and --disk-size cannot be combined"),
        (("--gpus", "-1"), "--gpus is '-1'; it must be greater than or equal to 0"),
    ],
)
def test_mistakes_are_explained(doctor: Run, options: tuple[str, ...], what: str) -> None:
    done = doctor(*options, code=2)
    assert what in json.loads(done.stderr.splitlines()[-1])["error"]["what"]


def report(**changes: Any) -> NodeReport:
    values: dict[str, Any] = {
        "node": "node1",
        "checked_at": "2026-11-22T11:00:00+00:00",
        "status": "fail",
        "checks": (
            Check(name="gpu_type", status="pass", value="NVIDIA \x1b[31mH100"),
            Check(name="gpu_pcie", status="warn", value="x8 of x16 on GPU 3", advice="reseat the GPU"),
            Check(name="gpu_nvlink", status="fail", value="inactive: 2 of 18 on GPU 3", advice="drain the node"),
        ),
        "not_checked": tuple(NotChecked(name=name, reason="no Slurm") for name in names_of("scheduler")),
    }
    return NodeReport(**{**values, **changes})


def test_what_is_wrong_is_first_with_advice_below() -> None:
    problems, passed, left_out = ("\n".join(plain_lines(table)) for table in node_tables(report()))
    assert problems.splitlines() == [
        "node1: FAIL (1 failed, 1 warned, 1 passed, 10 not checked)",
        "      check                   found, and what to do",
        "FAIL  NVLink                  inactive: 2 of 18 on GPU 3",
        "                              -> drain the node",
        "WARN  PCIe lanes of the GPUs  x8 of x16 on GPU 3",
        "                              -> reseat the GPU",
    ]
    assert "NVIDIA \\x1b[31mH100" in passed
    assert left_out.splitlines()[2:] == ["scheduler  all     no Slurm"]


def test_what_is_right_is_counted_unless_it_is_asked_for() -> None:
    (table,) = node_tables(report(), folded=True)
    lines = [*plain_lines(table)]
    assert lines[2].startswith("FAIL  NVLink")
    assert lines[-3:-1] == ["passed: gpu 1", "not checked: scheduler 10"]


def test_a_node_without_problems_needs_no_table_of_them() -> None:
    checks = (Check(name="gpu_type", status="pass", value="NVIDIA H100"),)
    tables = [*node_tables(report(status="pass", checks=checks, not_checked=()))]
    assert [*plain_lines(tables[0])] == ["node1: PASS (0 failed, 0 warned, 1 passed, 0 not checked)"]
    assert len(tables) == 2


def test_every_check_fits_80_columns() -> None:
    checks = [
        Check(name=rule.name, status="fail", value="x" * 30, advice=text)
        for rule in rules().values()
        for text in filter(None, (rule.advice, *rule.advice_for.values()))
    ]
    tables = [*node_tables(report(checks=tuple(checks)))]
    lines = shown_lines(tables)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.startswith("FAIL") and len(line.split()) < 3]


def test_a_single_report_is_also_at_the_top() -> None:
    document = doctor_document([report()])
    assert {key: document[key] for key in document if key != "nodes"} == document["nodes"][0]
    other = report(node="node2", status="pass", checks=(), not_checked=())
    assert {*doctor_document([report(), other])} == {"status", "nodes"}
    assert doctor_document([other, report()])["status"] == "fail"


def test_the_help_names_the_areas(llmb: Run) -> None:
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", llmb("doctor", "--help", code=0).stdout).split())
    assert ", ".join(AREAS) in shown
    assert "llmb doctor --gpu-type h100 --gpus 8" in shown
