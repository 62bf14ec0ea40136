# SPDX-License-Identifier: Apache-2.0
"""What a run records of its environment, network cards included."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from llmb.engine.environment import active_ports, assembler_version, cudnn_text, node_gpus, recorded_variables


def test_variables_that_may_hold_a_secret_are_not_recorded() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "HF_TOKEN": "hf_x",
        "LLMB_TOKEN": "x",
        "SLURM_JWT_KEY": "x",
        "SLURM_JWT": "x",
        "NVIDIA_PROXY": "https://someone:word@proxy:8080",
        "NVIDIA_API_KEY": "x",
        "CUDA_PASSWORD": "x",
        "HOME": "/root",
        "PATH": "/bin",
    }
    environ |= {"LLMB_STORE": "/tmp/llmb-ranks-x/store", "LLMB_STORE_ID": "5f"}
    assert recorded_variables(environ) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


ROW = (
    "0, 535.183.01, GPU-1, NVIDIA A100, Enabled, Disabled, Enabled, 400, 400, 60, 30, 210, 1215, 1410, 1215, 1410, 1215"
)


def test_a_driver_that_does_not_know_a_field_is_asked_for_the_others(program: Callable[[str, str], None]) -> None:
    program("nvidia-smi", f'case "$*" in *counters*) echo "Field is not valid"; exit 2;; esac; echo "{ROW}, 0x4"')
    assert [(gpu.node, gpu.uuid, gpu.throttle_reasons) for gpu in node_gpus("n").gpus] == [
        ("n", "GPU-1", ("sw_power_cap",))
    ]


def test_without_a_driver_there_are_no_gpus(program: Callable[[str, str], None]) -> None:
    program(
        "nvidia-smi", 'echo "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."; exit 9'
    )
    assert node_gpus("n") == (None, ())


@pytest.mark.parametrize(("number", "text"), [(91002, "9.10.2"), (90100, "9.1.0"), (8905, "8.9.5"), (None, None)])
def test_versions_of_cudnn(number: int | None, text: str | None) -> None:
    assert cudnn_text(number) == text


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_the_version_of_the_assembler_is_that_of_the_one_that_triton_calls(
    needs: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """Triton has another one for newer GPUs."""
    needs("triton", find_spec("triton") is not None, "Triton is not installed")
    from triton.backends.nvidia.compiler import get_ptxas

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    version = assembler_version(torch.device("cuda"))
    assert version is not None
    assert version.startswith(f"{get_ptxas(10 * capability[0]).version}.")


def make_port(devices: Path, name: str, *, port: int = 1, driver: str | None = "mlx5_core", **files: str) -> None:
    folder = devices / name / "ports" / str(port)
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n")
    if driver:
        home = devices.parent / "drivers" / driver
        home.mkdir(parents=True, exist_ok=True)
        (devices / name / "device").mkdir(exist_ok=True)
        (devices / name / "device" / "driver").symlink_to(home)


def test_active_ports_are_described_and_others_left_out(tmp_path: Path) -> None:
    devices = tmp_path / "infiniband"
    make_port(devices, "mlx5_1", state="4: ACTIVE", link_layer="InfiniBand", rate="400 Gb/sec (4X NDR)")
    make_port(devices, "mlx5_0", state="4: ACTIVE", link_layer="Ethernet", rate="100 Gb/sec (2X HDR)", port=2)
    make_port(devices, "mlx5_2", state="1: DOWN", link_layer="InfiniBand", rate="10 Gb/sec (4X SDR)")
    make_port(devices, "rdmap1s0", state="4: ACTIVE", driver="efa")
    make_port(devices, "odd", state="4: ACTIVE", rate="fast", driver=None)
    found = active_ports("node1", devices)
    assert [(one.device, one.port, one.driver, one.link_layer, one.gbit_s) for one in found] == [
        ("mlx5_0", 2, "mlx5_core", "Ethernet", 100.0),
        ("mlx5_1", 1, "mlx5_core", "InfiniBand", 400.0),
        ("odd", 1, None, None, None),
        ("rdmap1s0", 1, "efa", None, None),
    ]
    assert {one.node for one in found} == {"node1"}


def test_a_node_without_such_cards_has_no_ports(tmp_path: Path) -> None:
    assert active_ports("node1", tmp_path / "none") == ()
