# SPDX-License-Identifier: Apache-2.0
"""A node as files and programs show it: one with eight H100 and InfiniBand that is fit, for tests to make unfit."""

import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path

from llmb.base.tools import Output
from llmb.nodes.doctor.facts import FactSource
from llmb.runs.environment import QUERIES

GPUS = 8
LINKS = 18
UUID = "GPU-6f4e1c1e-5d6b-9a3b-1f0a-{:012d}"
NAME = "NVIDIA H100 80GB HBM3"
GPU = {
    "driver_version": "570.124.06",
    "name": NAME,
    "persistence_mode": "Enabled",
    "mig.mode.current": "Disabled",
    "ecc.mode.current": "Enabled",
    "power.limit": "700.00",
    "power.default_limit": "700.00",
    "power.draw": "71.20",
    "temperature.gpu": "31",
    "clocks.sm": "345",
    "clocks.mem": "2619",
    "clocks.max.sm": "1980",
    "clocks.max.mem": "2619",
    "clocks.applications.graphics": "1980",
    "clocks.applications.memory": "2619",
    "clocks_event_reasons.active": "0x0000000000000001",
    **{field: "0" for field in QUERIES[0] if "counters" in field},
    "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.uncorrected.aggregate.total": "0",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "fabric.state": "Completed",
    "fabric.status": "Success",
    "remapped_rows.uncorrectable": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
}
FILES = {
    "proc/uptime": "864000.00 1000.00",
    "proc/loadavg": "0.52 0.58 0.59 1/1021 12345",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8480C\n",
    "proc/meminfo": "MemTotal:       2113396736 kB\nMemFree:        2050000000 kB\nMemAvailable:   2060000000 kB\n"
    "SwapTotal:             0 kB\nSwapFree:              0 kB\nHugePages_Total:       0\nHugePages_Free:        0\n"
    "Hugepagesize:       2048 kB\n",
    "proc/sys/kernel/osrelease": "5.15.0-1053-nvidia",
    "proc/sys/kernel/numa_balancing": "0",
    "proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz-5.15.0-1053-nvidia root=/dev/md0 ro iommu=pt",
    "proc/modules": "nvidia_peermem 16384 0 - Live 0x0\nnvidia 56512512 3 nvidia_peermem, Live 0x0 (POE)\n",
    "proc/mounts": "/dev/md0 / ext4 rw,relatime 0 0\n10.0.0.1@o2ib:/scratch /scratch lustre rw,flock 0 0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/devices/system/cpu/online": "0-223",
    "sys/devices/system/node/node0/cpulist": "0-55,112-167",
    "sys/devices/system/node/node1/cpulist": "56-111,168-223",
    "sys/devices/system/edac/mc/mc0/ue_count": "0",
    "sys/devices/system/edac/mc/mc0/ce_count": "0",
}
ADDRESSES = r"""1: lo    inet 127.0.0.1/8 scope host lo\       valid_lft forever preferred_lft forever
1: lo    inet6 ::1/128 scope host \       valid_lft forever preferred_lft forever
2: eth0    inet 10.1.2.3/16 brd 10.1.255.255 scope global eth0\       valid_lft forever preferred_lft forever
2: eth0    inet6 fe80::fc:ff:fe00:1/64 scope link \       valid_lft forever preferred_lft forever
3: docker0    inet 172.17.0.1/16 brd 172.17.255.255 scope global docker0\       valid_lft forever preferred_lft forever
"""
CPU_FILES = {
    "cpufreq/scaling_governor": "performance",
    "topology/thread_siblings_list": "0,112",
    "cpuidle/state0/name": "POLL",
    "cpuidle/state0/latency": "0",
    "cpuidle/state0/disable": "0",
    "cpuidle/state1/name": "C6",
    "cpuidle/state1/latency": "290",
    "cpuidle/state1/disable": "0",
}
PORT_FILES = {
    "link_layer": "InfiniBand",
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
    "counters/symbol_error": "0",
    "counters/link_downed": "1",
    "counters/port_rcv_errors": "0",
}
CHRONY = """Reference ID    : 0A000001 (time1)
Stratum         : 3
Ref time (UTC)  : Sun Nov 22 11:45:01 2026
System time     : 0.000031625 seconds slow of NTP time
Last offset     : -0.000032352 seconds
RMS offset      : 0.000032352 seconds
Leap status     : Normal
"""
SOFTWARE = (
    '{"python": "3.12.3", "llmb": "VERSION", "torch": "2.11.0+cu128", "nccl_package": "2.27.5",'
    ' "driver_cuda": "12.8"}\n'
    '{"cuda": "12.8", "gpus": 8, "nccl": "2.27.5", "architectures": ["sm_80", "sm_90", "sm_100"],'
    ' "capabilities": ["90", "90", "90", "90", "90", "90", "90", "90"]}\n'
)
NO_PROGRAM = "{} was not found"


class RecordedNode:
    """``gpus`` are rows of nvidia-smi, ``links`` and ``link_errors`` those of its nvlink; ``said`` is by the beginning
    of a command, and replaces all else."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: dict[str, str | Output] = {
            "chronyc": CHRONY,
            "getent": "10.1.2.3      STREAM node1\n10.1.2.3      DGRAM\n",
            "ip -o address show up": ADDRESSES,
            "nvidia-smi --query-compute-apps": "",
        }
        self.gpus = [{"index": str(index), "uuid": UUID.format(index), **GPU} for index in range(GPUS)]
        self.links = [[26.562] * LINKS for _ in range(GPUS)]
        self.link_errors = [{"Replay": 0, "Recovery": 0, "CRC": 0} for _ in range(GPUS)]
        for name, text in FILES.items():
            self.write(name, text)
        for name, text in CPU_FILES.items():
            self.write(f"sys/devices/system/cpu/cpu0/{name}", text)
        for index in range(GPUS):
            self.add_gpu_on_bus(f"0000:{index:02x}:00.0")
            for name, text in PORT_FILES.items():
                self.write_port(f"mlx5_{index}", name, text)
        self.add_card("eth0", speed="100000", operstate="up", mtu="1500", rx_packets="1000000")
        self.cores = 224
        self.shm_bytes: tuple[int, int] | None = (1000 * 2**30, 999 * 2**30)
        """Size and what is free; None is no /dev/shm."""
        self.limits = {
            resource.RLIMIT_MEMLOCK: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
            resource.RLIMIT_NOFILE: (65536, 1048576),
            resource.RLIMIT_NPROC: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
            resource.RLIMIT_STACK: (8 * 2**20, resource.RLIM_INFINITY),
        }

    @property
    def source(self) -> FactSource:
        return FactSource(
            root=self.root,
            ask=self.ask,
            environ={"HOME": "/home/u"},
            cores=lambda: self.cores,
            rlimit=lambda number: self.limits[number],
            statvfs=self.statvfs,
        )

    def statvfs(self, path: Path) -> os.statvfs_result:
        if self.shm_bytes is None:
            raise FileNotFoundError(path)
        size, free = self.shm_bytes
        return os.statvfs_result((1, 1, size, free, free, 0, 0, 0, 0, 255))

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def write_port(self, device: str, name: str, text: str, number: int = 1) -> None:
        self.write(f"sys/class/infiniband/{device}/ports/{number}/{name}", text)

    def add_gpu_on_bus(self, address: str, numa_node: int = 0) -> None:
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(numa_node))):
            self.write(f"sys/bus/pci/devices/{address}/{name}", text)

    def add_card(self, name: str, **values: str) -> None:
        (self.root / "sys/class/net" / name / "device").mkdir(parents=True, exist_ok=True)
        for key, text in values.items():
            folder = "statistics/" if key.startswith(("rx_", "tx_")) else ""
            self.write(f"sys/class/net/{name}/{folder}{key}", text)

    def ask(self, command: Sequence[str], limit_s: float) -> Output:
        text = " ".join(command)
        for beginning, said in self.said.items():
            if text.startswith(beginning):
                return said if isinstance(said, Output) else Output(said)
        if command[0] != "nvidia-smi":
            return Output("", NO_PROGRAM.format(command[0]))
        if query := re.match(r"--query-(?:gpu|remapped-rows)=(.*)", command[1]):
            return self._queried(query[1].split(","))
        return Output(self.status() if command[2] == "--status" else self.counters())

    def _queried(self, fields: Sequence[str]) -> Output:
        rows = [{**gpu, "gpu_uuid": gpu["uuid"]} for gpu in self.gpus]
        for field in fields:
            if any(field not in row for row in rows):
                return Output("", f'nvidia-smi: Field "{field}" is not a valid field to query.')
        return Output("".join(", ".join(row[field] for field in fields) + "\n" for row in rows))

    def status(self) -> str:
        """As ``nvidia-smi nvlink --status`` prints it."""
        lines = []
        for gpu, links in enumerate(self.links):
            lines.append(f"GPU {gpu}: {NAME} (UUID: {UUID.format(gpu)})")
            lines += [
                f"\t Link {link}: {f'{rate:g} GB/s' if rate else '<inactive>'}" for link, rate in enumerate(links)
            ]
        return "\n".join(lines) + "\n"

    def counters(self) -> str:
        """As ``nvidia-smi nvlink --errorcounters`` prints it; all errors are those of the second link."""
        lines = []
        for gpu, counts in enumerate(self.link_errors):
            lines.append(f"GPU {gpu}: {NAME} (UUID: {UUID.format(gpu)})")
            for link in range(LINKS):
                lines += [f"\t Link {link}: {kind} Errors: {count * (link == 1)}" for kind, count in counts.items()]
                lines.append("")
        return "\n".join(lines) + "\n"
