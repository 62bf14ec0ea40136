# SPDX-License-Identifier: Apache-2.0
"""Network cards with RDMA, from folders like those of the kernel."""

from pathlib import Path

from llmb.engine.environment import active_ports


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
