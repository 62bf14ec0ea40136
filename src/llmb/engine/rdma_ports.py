# SPDX-License-Identifier: Apache-2.0
"""Describes the network cards with RDMA that this process may see: InfiniBand, RoCE and EFA."""

import re
from pathlib import Path

from llmb.runs.environment import RdmaPort

DEVICES = Path("/sys/class/infiniband")


def active_ports(node: str, devices: Path = DEVICES) -> tuple[RdmaPort, ...]:
    """In the order of their names; empty where the kernel shows none."""
    return tuple(_port(node, path) for path in sorted(devices.glob("*/ports/*")) if "ACTIVE" in (_text(path, "state")))


def _port(node: str, path: Path) -> RdmaPort:
    device = path.parent.parent
    rate = re.match(r"\d+(?:\.\d+)?", _text(path, "rate"))
    driver = (device / "device" / "driver").resolve()
    return RdmaPort(
        node=node,
        device=device.name,
        port=int(path.name),
        driver=driver.name if driver.exists() else None,
        link_layer=_text(path, "link_layer") or None,
        gbit_s=float(rate[0]) if rate else None,
    )


def _text(path: Path, name: str) -> str:
    try:
        return (path / name).read_text().strip()
    except OSError:
        return ""
