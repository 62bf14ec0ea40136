# SPDX-License-Identifier: Apache-2.0
"""A GPU type is one entry in hardware.yaml: every command knows it then."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import llmb
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve

ENTRY = """
- gpu_type: x100
  name: A GPU that does not exist
  peak_tflops: {bf16: 1000, fp8: 2000}
  memory_gb: 192
  memory_bandwidth_tb_s: 5
  nvlink_gb_s: 900
  nvlink_domain_gpus: 8
  gpus_per_node: 8
  device_names: ["NVIDIA X100*"]
  borrows: [b200, h100]
  nvlink_c2c: true
  sources: {peak_tflops: test, memory_gb: test, memory_bandwidth_tb_s: test, nvlink_gb_s: test}
"""
RECIPE = ("-w", "pretrain_llama3.1", "-s", "8b", "--gpu-type", "x100")
CUSTOM = (*RECIPE, "--scale", "24", "--tp", "4", "--cp", "1", "--gbs", "48")
COMMANDS = (
    ("list",),
    ("show", *RECIPE, "--scale", "8"),
    ("show", *RECIPE, "--scale", "1"),
    ("show", *CUSTOM),
    ("metrics", *CUSTOM, "--step-time", "2"),
    ("run", *RECIPE, "--scale", "1", "--mbs", "2", "--gbs", "4", "--dry-run"),
    ("submit", *CUSTOM, "--dry-run"),
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package whose catalogue has one entry more."""
    root = tmp_path_factory.mktemp("package")
    shutil.copytree(Path(llmb.__file__).parent, root / "llmb", ignore=shutil.ignore_patterns("__pycache__"))
    with (root / "llmb" / "catalogue" / "data" / "hardware.yaml").open("a") as hardware:
        hardware.write(ENTRY)
    (root / "cluster_config.yaml").touch()
    return root


@pytest.fixture(scope="module")
def printed(package: Path) -> list[dict[str, Any]]:
    """What each of ``COMMANDS`` prints, all of them called in one process."""
    code = "for words in json.loads(sys.argv[1]): assert exit_code_of(app, [*words, '--json']) == 0; print(end='\\0')"
    command = [sys.executable, "-c", f"import json, sys; from llmb.cli.main import app, exit_code_of\n{code}"]
    environ = {**os.environ, "PYTHONPATH": str(package), "LLMB_INSTALL": str(package)}
    done = subprocess.run([*command, json.dumps(COMMANDS)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(document) for document in done.stdout.split("\0")[:-1]]


def is_layout_of(gpu_type: str, shown: dict[str, Any]) -> bool:
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type=gpu_type, scale=shown["gpus"])
    layout = resolve(Catalogue(), request).layout
    return all(getattr(layout, name) == value for name, value in shown.items())


def test_it_is_listed_for_every_size_and_borrows_layouts(printed: list[dict[str, Any]]) -> None:
    listed, borrowed, proxy = printed[:3]
    for workload in listed["workloads"]:
        for size, found in workload["sizes"].items():
            if size not in ("120b", "671b", "1t"):  # only of the GPU types in Megatron-Bridge's tables
                assert "x100" in found["gpu_types"], (workload["workload"], size)
    assert is_layout_of("h100", borrowed["layout"])
    assert borrowed["notes"][-1] == "the layout was published for h100; x100 has none"
    assert {"NCCL_NVLS_ENABLE", "NCCL_NET_GDR_C2C"} <= {item["name"] for item in borrowed["job"]["variables"]}
    assert proxy["recipe"]["proxy"]
    assert is_layout_of("b200", proxy["layout"])


def test_a_custom_layout_can_be_shown_measured_planned_and_submitted(printed: list[dict[str, Any]]) -> None:
    shown, measured, plan, submitted = printed[3:]
    assert (shown["layout"]["gpus"], shown["layout"]["dp"], shown["peak_tflops"]) == (24, 6, 1000)
    assert measured["mfu_pct"]["full"] > 0
    assert plan["plan"]["recipe"]["gpu_type"] == "x100"
    assert "#SBATCH --nodes=3" in json.dumps(submitted)
