# SPDX-License-Identifier: Apache-2.0
"""Reads a node's counters and kernel messages, without root privileges.

Files: Documentation/ABI/{stable/sysfs-class-infiniband,testing/sysfs-class-net-statistics,testing/sysfs-devices-edac,
testing/dev-kmsg} and Documentation/PCI/pcieaer-howto.rst of the Linux kernel.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from llmb.readers.samples.host import ROOT, cgroup_folders
from llmb.readers.samples.sample_records import CounterReading

MOST_S = 1.0
"""Seconds after which a reading skips the remaining areas, which are reported as unread."""
MOST_LINES, MOST_CHARACTERS = 200, 300
"""Maximum number of lines of the kernel's log to keep, and their maximum length."""
VIRTUAL = ("lo", "docker", "veth", "virbr", "br-", "cni", "cali", "ifb", "dummy", "tun", "tap")
"""Beginnings of the names of interfaces without a cable."""
PCI_CLASSES = {"0x03": "GPU", "0x02": "network card", "0x01": "storage"}
OF_MEMORY = ("oom_kill", "pgmajfault", "pswpin", "pswpout")
"""Counters of /proc/vmstat, of all processes of the node."""
OF_TCP = ("RetransSegs", "OutSegs", "InErrs")
KERNEL = "kernel_log"
WORTH_KEEPING = re.compile(
    r"NVRM|nvidia|AER:|PCIe|Hardware Error|mce:|EDAC|link|carrier|oom|Out of memory|blocked for more|lockup|stall"
    r"|I/O error|not responding|Lustre|controller is down|thermal|throttl",
    re.IGNORECASE,
)
"""Occurs in the kernel's lines to keep, which ``machine.yaml`` classifies."""
_RECORD = re.compile(r"^\d+,\d+,\d+,[^;]*;")
Counters = Iterable[tuple[str, int]]


class KernelLog:
    """The kernel's log since this object was created; ``reason`` is None unless the log cannot be read."""

    def __init__(self, root: Path = ROOT) -> None:
        self.reason: str | None = None
        self.file: int | None = None
        try:
            self.file = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self.file, 0, os.SEEK_END)
        except OSError as error:
            self.reason = f"/dev/kmsg: {error.strerror}"

    def lines(self) -> tuple[str, ...]:
        """Return the messages since the last call that are worth keeping; if there are many, the newest."""
        text = "".join(self._records())
        records = (_RECORD.sub("", line) for line in text.splitlines() if _RECORD.match(line))
        return tuple(line[:MOST_CHARACTERS] for line in records if WORTH_KEEPING.search(line))[-MOST_LINES:]

    def _records(self) -> Iterator[str]:
        """Yield the new records, one per read; EPIPE means that some were overwritten."""
        while self.file is not None:
            try:
                data = os.read(self.file, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue
            except OSError as error:
                self.reason = f"/dev/kmsg: {error.strerror}"
                return
            if not data:
                return
            yield data.decode(errors="replace")


def read_counters(
    kernel: KernelLog, gpus: Callable[[], Counters] | None = None, no_gpus: str | None = None, root: Path = ROOT
) -> CounterReading:
    """Read counters and kernel messages. ``gpus`` reads the GPUs' counters; ``no_gpus`` is the reason if it is None."""
    end_s = time.monotonic() + MOST_S
    counters: dict[str, int] = {}
    read: list[str] = []
    unread: dict[str, str] = {"gpu": no_gpus} if no_gpus else {}
    areas: dict[str, Callable[[], Counters]] = {
        **({"gpu": gpus} if gpus else {}),
        **{area: partial(reader, root) for area, reader in AREAS.items()},
    }
    for area, reader in areas.items():
        if time.monotonic() > end_s:
            unread[area] = f"not read within {MOST_S:g} s"
            continue
        try:
            values = dict(reader())
        except FileNotFoundError:
            continue  # the node has no such device
        except OSError as error:
            unread[area] = f"{error.filename or area}: {error.strerror}"
            continue
        read.append(area)
        counters |= {f"{area}/{name}": value for name, value in values.items() if value}
    lines = kernel.lines()
    if kernel.reason:
        unread[KERNEL] = kernel.reason
    else:
        read.append(KERNEL)
    return CounterReading(read_at_s=time.time(), counters=counters, read=tuple(read), unread=unread, kernel=lines)


def _rdma(root: Path) -> Counters:
    for port in _listed(root / "sys/class/infiniband", "*/ports/*"):
        device = port.parent.parent.name
        name = device if port.name == "1" else f"{device}:{port.name}"
        for file in (*port.glob("counters/*"), *port.glob("hw_counters/*")):
            if (value := _number(file)) is not None:
                yield f"{name}/{file.name}", value


def _network(root: Path) -> Counters:
    for interface in _listed(root / "sys/class/net", "*"):
        if interface.name.startswith(VIRTUAL):
            continue
        for file in (interface / "carrier_changes", *interface.glob("statistics/*")):
            if (value := _number(file)) is not None:
                yield f"{interface.name}/{file.name}", value


def _tcp(root: Path) -> Counters:
    names, values = (
        line.split()[1:] for line in (root / "proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    counts = dict(zip(names, values, strict=False))
    return ((f"node/{name}", int(counts[name])) for name in OF_TCP if name in counts)


def _pci(root: Path) -> Counters:
    for device in _listed(root / "sys/bus/pci/devices", "*"):
        if _text(device / "class")[:4] not in PCI_CLASSES:
            continue
        for kind in ("correctable", "nonfatal", "fatal"):
            total = re.search(r"^TOTAL_ERR_\w+ (\d+)", _text(device / f"aer_dev_{kind}"), re.MULTILINE)
            if total:
                yield f"{device.name}/aer_{kind}", int(total[1])


def _host_memory(root: Path) -> Counters:
    for controller in _listed(root / "sys/devices/system/edac/mc", "mc*"):
        for name in ("ce_count", "ue_count"):
            if (value := _number(controller / name)) is not None:
                yield f"{controller.name}/{name}", value


def _cpu(root: Path) -> Counters:
    """Read one counter per CPU package: each core shows its package's counter."""
    most: dict[str, int] = {}
    for core in _listed(root / "sys/devices/system/cpu", "cpu[0-9]*"):
        count = _number(core / "thermal_throttle/package_throttle_count")
        if count is not None:
            package = f"package{_text(core / 'topology/physical_package_id') or '0'}"
            most[package] = max(count, most.get(package, 0))
    return ((f"{package}/throttle_count", count) for package, count in most.items())


def _memory(root: Path) -> Counters:
    lines = (line.split() for line in (root / "proc/vmstat").read_text().splitlines())
    return [(f"node/{words[0]}", int(words[1])) for words in lines if words and words[0] in OF_MEMORY]


def _cgroup(root: Path) -> Counters:
    groups = list(cgroup_folders(root, "memory"))
    if not groups:
        raise FileNotFoundError("proc/self/cgroup")
    for group in [folder for folder in groups if folder.name.startswith("job_")] or groups:
        for name in ("memory.events", "memory.oom_control"):
            if kills := re.search(r"^oom_kill (\d+)", _text(group / name), re.MULTILINE):
                yield "job/oom_kill", int(kills[1])
                return


AREAS: Mapping[str, Callable[[Path], Counters]] = {
    "rdma": _rdma,
    "network": _network,
    "tcp": _tcp,
    "pci": _pci,
    "host_memory": _host_memory,
    "cpu": _cpu,
    "memory": _memory,
    "cgroup": _cgroup,
}


def _listed(folder: Path, pattern: str) -> list[Path]:
    if not any(folder.iterdir()):
        raise FileNotFoundError(folder)
    return sorted(folder.glob(pattern))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None
