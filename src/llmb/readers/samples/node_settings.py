# SPDX-License-Identifier: Apache-2.0
"""Settings of nodes that may affect step times, as text by dotted key, without values that change during a run."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import NamedTuple

from pydantic import Field

from llmb.base.input_files import SystemFiles
from llmb.base.record import Record
from llmb.base.secrets import without_secrets

PREFIXES = ("kernel.", "sysctl.", "cpu.", "bios.", "gpu.", "modules.", "nic.", "interface.", "pcie.", "image.")
"""Prefixes of keys that only settings have."""
SET_OR_NOT = "variables."
"""The prefix of keys that may be unset; any other missing key could not be read."""


FILE_ENDING = ".settings.json"
"""Suffix of the files that samplers write for the record of a run, one per node."""


class NodeSettings(Record):
    """Settings of one node."""

    values: dict[str, str]
    missing: dict[str, str]
    """The reasons why settings could not be read, by the name of their ``SettingsGroup``."""


class NodesSettings(Record):
    """Settings of several nodes: the common values once, and each node's differences."""

    nodes: tuple[str, ...]
    usual: dict[str, str]
    """The most frequent value, by key; without keys that are missing on more nodes than have any one value."""
    unlike: dict[str, dict[str, str | None]] = Field(default_factory=dict)
    """The values that differ from the usual ones, by node and key; None if the node has no value."""
    missing: dict[str, str]
    """The reasons why settings could not be read on some node, by the name of their ``SettingsGroup``."""
    unread: dict[str, str] = Field(default_factory=dict)
    """The reason why a node has no settings at all, by node; such nodes are not in ``nodes``."""

    def of_node(self, node: str) -> dict[str, str]:
        """Return the settings of a node; for an unknown node, the usual settings."""
        values = {**self.usual, **self.unlike.get(node, {})}
        return {key: value for key, value in values.items() if value is not None}

    def with_others(self, others: "NodesSettings") -> "NodesSettings":
        """Return these settings merged with ``others`` of the same nodes; ``others`` take precedence."""
        unlike = {
            node: {**self.unlike.get(node, {}), **others.unlike.get(node, {})}
            for node in self.nodes
            if node in self.unlike or node in others.unlike
        }
        missing = {**self.missing, **others.missing}
        usual = {**self.usual, **others.usual}
        return self.model_copy(update={"usual": usual, "unlike": unlike, "missing": missing})

    def of_all(self) -> dict[str, str]:
        """Return each key with its common value, or with the different values of all nodes, separated by commas."""
        every: dict[str, set[str]] = {}
        for node in self.nodes:
            for key, value in self.unlike.get(node, {}).items():
                every.setdefault(key, set()).update({value} if value is not None else ())
        usual = {key for key in every if any(key not in self.unlike.get(node, {}) for node in self.nodes)}
        for key in usual & self.usual.keys():
            every[key].add(self.usual[key])
        return self.usual | {key: ", ".join(sorted(values)) for key, values in every.items()}

    def nodes_by_value(self, key: str) -> dict[str | None, list[str]]:
        """Return the nodes by their value of ``key``, the usual value first."""
        groups: dict[str | None, list[str]] = {self.usual.get(key): []}
        for node in self.nodes:
            unlike = self.unlike.get(node, {})
            groups.setdefault(unlike[key] if key in unlike else self.usual.get(key), []).append(node)
        return groups


def together(by_node: Mapping[str, NodeSettings]) -> NodesSettings:
    """Combine the settings of nodes, in their order: the most frequent values, and each node's differences."""
    keys = sorted({key for settings in by_node.values() for key in settings.values})
    usual, unlike = dict[str, str](), dict[str, dict[str, str | None]]()
    for key in keys:
        values = {node: settings.values.get(key) for node, settings in by_node.items()}
        ((most, count),) = Counter(values.values()).most_common(1)
        if most is not None:
            usual[key] = most
        if count < len(values):
            for node, value in values.items():
                if value != most:
                    unlike.setdefault(node, {})[key] = value
    missing = {name: reason for settings in by_node.values() for name, reason in settings.missing.items()}
    return NodesSettings(nodes=tuple(by_node), usual=usual, unlike=unlike, missing=missing)


LIMIT_S = 1.0
"""After this time, no further group of settings is read."""
SYSCTLS = (
    *("vm.zone_reclaim_mode", "vm.swappiness", "vm.overcommit_memory", "vm.nr_hugepages", "vm.dirty_ratio"),
    *("vm.dirty_background_ratio", "vm.min_free_kbytes", "vm.vfs_cache_pressure", "vm.compaction_proactiveness"),
    *("vm.watermark_scale_factor", "vm.stat_interval", "vm.max_map_count"),
    *("kernel.numa_balancing", "kernel.sched_autogroup_enabled", "kernel.sched_rt_runtime_us"),
    *("kernel.timer_migration", "kernel.nmi_watchdog", "kernel.soft_watchdog"),
    *("net.core.rmem_max", "net.core.wmem_max", "net.core.rmem_default", "net.core.wmem_default"),
    *("net.core.netdev_max_backlog", "net.core.optmem_max", "net.core.somaxconn", "net.core.default_qdisc"),
    *("net.core.busy_poll", "net.core.busy_read"),
    *("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "net.ipv4.tcp_congestion_control", "net.ipv4.tcp_mtu_probing"),
    *("net.ipv4.tcp_timestamps", "net.ipv4.tcp_sack", "net.ipv4.tcp_window_scaling"),
    *("net.ipv4.tcp_slow_start_after_idle", "net.ipv4.conf.all.rp_filter", "net.ipv4.conf.all.arp_ignore"),
    *("net.ipv4.conf.all.arp_announce",),
)
BOOT_WORDS = re.compile(
    r"(?:iommu|intel_iommu|amd_iommu|iommu\.\w+|isolcpus|nohz_full|rcu_nocbs|mitigations|nopti|pti|spectre_v2|preempt"
    r"|spec_store_bypass_disable|transparent_hugepage|(?:default_)?hugepagesz|hugepages|numa_balancing|numa"
    r"|intel_idle\.\w+|processor\.\w+|idle|cpuidle\.\w+|intel_pstate|amd_pstate|cpufreq\.\w+|nosmt|maxcpus|nr_cpus|mem"
    r"|tsc|clocksource|pci|pcie_aspm|pcie_acs_override|init_on_alloc|init_on_free|skew_tick|nmi_watchdog|nowatchdog"
    r"|audit|crashkernel|nvidia\S*|mlx\S*)(?:=.*)?"
)
"""Relevant words of the kernel's command line."""
DRIVER_OPTIONS = (
    *("EnablePCIERelaxedOrderingMode", "EnableResizableBar", "EnableGpuFirmware", "EnableStreamMemOPs", "EnableMSI"),
    *("DmaRemapPeerMmio", "InitializeSystemMemoryAllocations", "PreserveVideoMemoryAllocations", "RegistryDwords"),
)
"""Options of the module of NVIDIA's driver."""
LOADED = {"nvidia_peermem": "peermem", "gdrdrv": "gdrcopy"}
"""Modules whose absence is meaningful."""
VERSIONED = ("mlx5_core", "ib_core", "efa", "nvidia_fs", "lustre", "bnxt_re", "irdma")
"""Modules that may have their own versions."""
FABRIC_VARIABLES = ("NCCL_", "UCX_", "FI_", "NVSHMEM_")
OF_ONE_RUN = re.compile(r"_(?:FILE|DIR|PATH|HOME|ID|HOSTID)$|^NCCL_DEBUG|^NCCL_COMM_ID$|_LOG_LEVEL$")
"""Variables that name files and jobs, or control logging."""
PCI, NVIDIA, DISPLAYS = "/sys/bus/pci/devices", "0x10de", ("0x0300", "0x0302")
NETWORKS = ("0x0200", "0x0207")
"""PCI classes of network cards: Ethernet and InfiniBand."""
HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
PATH_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""The kinds of path that ``nvidia-smi topo -m`` prints, from near to far."""
OF_PCI = 256
"""Number of configuration bytes that every PCI device has."""
CPU, RDMA, NET = "/sys/devices/system/cpu", "/sys/class/infiniband", "/sys/class/net"
POWER = "/sys/class/powercap"
Settings = Iterator[tuple[str, str | int | None]]


class SettingsGroup(NamedTuple):
    """A function that reads a group of settings; ``missing`` is the reason if it reads none."""

    name: str
    read: Callable[[SystemFiles, Mapping[str, str]], Settings]
    missing: str


def read_settings(files: SystemFiles, environ: Mapping[str, str], limit_s: float = LIMIT_S) -> NodeSettings:
    """Read all settings; never raise. Groups without values or not reached within ``limit_s`` are in ``missing``."""
    values, missing = dict[str, str](), dict[str, str]()
    due_s = time.monotonic() + limit_s
    for group in GROUPS:
        if time.monotonic() > due_s:
            missing[group.name] = f"reading the settings before it took longer than {limit_s:g} s"
            continue
        read = {key: str(value) for key, value in group.read(files, environ) if value not in (None, "")}
        values |= read
        if not read:
            missing[group.name] = group.missing
    return NodeSettings(values=values, missing=missing)


def _kernel(files: SystemFiles, _: Mapping[str, str]) -> Settings:
    yield "kernel.release", files.text("/proc/sys/kernel/osrelease")
    line = files.text("/proc/cmdline")
    if line is not None:
        yield "kernel.command_line", " ".join(filter(BOOT_WORDS.fullmatch, line.split())) or "none"
    for name in ("enabled", "defrag"):
        chosen = re.search(r"\[(\S+)\]", files.text(f"/sys/kernel/mm/transparent_hugepage/{name}") or "")
        yield f"kernel.transparent_hugepage.{name}", chosen and chosen[1]
    page = re.search(r"^KernelPageSize:\s*(\d+ kB)", files.text("/proc/self/smaps") or "", re.MULTILINE)
    yield "kernel.page_size", page and page[1]
    yield "kernel.clocksource", files.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    groups = "/sys/kernel/iommu_groups"
    yield "kernel.iommu", _together(files.text(f"{groups}/{group}/type") for group in files.names(groups))


def _sysctls(files: SystemFiles, _: Mapping[str, str]) -> Settings:
    for name in SYSCTLS:
        text = files.text(f"/proc/sys/{name.replace('.', '/')}")
        yield f"sysctl.{name}", text and " ".join(text.split())


def _cpus(files: SystemFiles, _: Mapping[str, str]) -> Settings:
    info = files.text("/proc/cpuinfo") or ""
    for key, name in (("hardware.cpu", "model name"), ("cpu.microcode", "microcode")):
        yield key, _together(re.findall(rf"^{name}\s*:\s*(.*)$", info, re.MULTILINE))
    cpus = [name for name in files.names(CPU) if re.fullmatch(r"cpu\d+", name)]
    for key, name in (
        ("governor", "scaling_governor"),
        ("preference", "energy_performance_preference"),
        ("max_khz", "scaling_max_freq"),
        ("driver", "scaling_driver"),
    ):
        yield f"cpu.{key}", _together(files.text(f"{CPU}/{cpu}/cpufreq/{name}") for cpu in cpus)
    off = files.number(f"{CPU}/intel_pstate/no_turbo")
    on = files.number(f"{CPU}/cpufreq/boost") if off is None else 1 - off
    yield "cpu.boost", None if on is None else "on" if on else "off"
    limits = (files.number(f"{POWER}/{zone}/constraint_0_power_limit_uw") for zone in files.names(POWER))
    yield "cpu.power_limit", _together(f"{limit / 1e6:g} W" for limit in limits if limit)
    yield "cpu.online", files.text(f"{CPU}/online")
    yield "cpu.smt", files.text(f"{CPU}/smt/control")
    idle = f"{CPU}/cpu0/cpuidle"
    states = [state for state in files.names(idle) if files.number(f"{idle}/{state}/disable") == 0]
    yield "cpu.idle_states", ", ".join(filter(None, (files.text(f"{idle}/{state}/name") for state in states)))


def _bios(files: SystemFiles, _: Mapping[str, str]) -> Settings:
    for key, name in (
        ("vendor", "bios_vendor"),
        ("version", "bios_version"),
        ("date", "bios_date"),
        ("system", "product_name"),
    ):
        yield f"bios.{key}", files.text(f"/sys/class/dmi/id/{name}")


def _driver(files: SystemFiles, _: Mapping[str, str]) -> Settings:
    """Read the settings of NVIDIA's driver, and the versions of the GPUs' firmware."""
    version = files.text("/proc/driver/nvidia/version") or ""
    number = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", version)
    yield "software.driver", number and number[1]
    yield "gpu.driver_modules", ("open" if "Open Kernel Module" in version else "proprietary") if version else None
    options = dict(re.findall(r"^(\w+): *(.*)$", files.text("/proc/driver/nvidia/params") or "", re.MULTILINE))
    for name in DRIVER_OPTIONS:
        yield f"gpu.driver_option.{name}", options.get(name)
    gpus = "/proc/driver/nvidia/gpus"
    texts = [files.text(f"{gpus}/{gpu}/information") or "" for gpu in files.names(gpus)]
    for key, title in (("vbios", "Video BIOS"), ("firmware", "GPU Firmware")):
        yield f"gpu.{key}", _together(re.findall(rf"^{title}:\s*(\S+)", "\n".join(texts), re.MULTILINE))


def _modules(files: SystemFiles, _: Mapping[str, str]) -> Settings:
    listed = files.text("/proc/modules")
    loaded = {line.split(" ", 1)[0] for line in (listed or "").splitlines()}
    if "nvidia" in loaded:
        for module, name in LOADED.items():
            yield f"modules.{name}", "loaded" if module in loaded else "not loaded"
    for module in VERSIONED:
        yield f"modules.{module}", files.text(f"/sys/module/{module}/version")


def _rdma(files: SystemFiles, _: Mapping[str, str]) -> Settings:
    devices = files.names(RDMA)
    yield "nic.devices", ", ".join(devices)
    for device in devices:
        folder, name = f"{RDMA}/{device}", f"nic.{device}"
        yield f"{name}.firmware", files.text(f"{folder}/fw_ver")
        yield f"{name}.board", files.text(f"{folder}/board_id")
        yield f"{name}.mtu", _mtus(files, f"{folder}/device/net")
        yield f"{name}.link", _link(files, f"{folder}/device", "current")
        for port in files.names(f"{folder}/ports"):
            of = name if port == "1" else f"{name}:{port}"
            yield f"{of}.state", (files.text(f"{folder}/ports/{port}/state") or "").rpartition(": ")[2]
            yield f"{of}.rate", files.text(f"{folder}/ports/{port}/rate")
            yield f"{of}.layer", files.text(f"{folder}/ports/{port}/link_layer")


def _mtus(files: SystemFiles, interfaces: str) -> str | None:
    return _together(files.text(f"{interfaces}/{name}/mtu") for name in files.names(interfaces))


def _interfaces(files: SystemFiles, _: Mapping[str, str]) -> Settings:
    """Yield the MTU and speed of interfaces with a device; virtual ones, as for containers, come and go."""
    for name in files.names(NET):
        if files.exists(f"{NET}/{name}/device"):
            yield f"interface.{name}.mtu", files.number(f"{NET}/{name}/mtu")
            speed = files.number(f"{NET}/{name}/speed")
            yield f"interface.{name}.mbit_s", speed if speed and speed > 0 else None


def _pcie(files: SystemFiles, _: Mapping[str, str]) -> Settings:
    """A link's current speed is not read: an idle GPU lowers it."""
    kinds: dict[str, list[str]] = {"gpus": [], "nics": []}
    for name in files.names(PCI):
        kind = (files.text(f"{PCI}/{name}/class") or "")[:6]
        if kind in DISPLAYS and files.text(f"{PCI}/{name}/vendor") == NVIDIA:
            kinds["gpus"].append(f"{PCI}/{name}")
        elif kind in NETWORKS and not files.exists(f"{PCI}/{name}/physfn"):
            kinds["nics"].append(f"{PCI}/{name}")
    for kind, devices in kinds.items():
        if devices:
            yield f"pcie.{kind}", len(devices)
            yield f"pcie.{kind}.max_link", _counted(_link(files, device, "max") for device in devices)
            yield f"pcie.{kind}.width", _counted(files.text(f"{device}/current_link_width") for device in devices)
            yield f"pcie.{kind}.max_read_request", _counted(_read_request(files, device) for device in devices)
    yield "pcie.nearest_nics", _nearest_nics(files, kinds["gpus"], kinds["nics"])


def _nearest_nics(files: SystemFiles, gpus: list[str], nics: list[str]) -> str | None:
    cards = [(nic, name) for nic in nics for name in files.names(f"{nic}/infiniband")]
    nearest = []
    for gpu in gpus:
        paths = [(_path_kind(files, gpu, nic), name) for nic, name in cards]
        best = min((kind for kind, _ in paths if kind), key=PATH_KINDS.index, default=None)
        if best:
            names = ", ".join(name for kind, name in paths if kind == best)
            nearest.append(f"{gpu.rpartition('/')[2]} {best} {names}")
    return "; ".join(nearest) or None


def _path_kind(files: SystemFiles, one: str, other: str) -> str | None:
    paths = [_below_host_bridge(files, device) for device in (one, other)]
    if not all(paths):
        return None
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*paths, strict=False))))
    if shared > 1:  # PIX is the path through one switch, with a port above each device
        return "PIX" if max(map(len, paths)) - shared <= 2 else "PXB"
    if shared:
        return "PHB"
    return "NODE" if files.text(f"{one}/numa_node") == files.text(f"{other}/numa_node") else "SYS"


def _below_host_bridge(files: SystemFiles, device: str) -> list[str]:
    parts = files.path(device).resolve().parts
    return list(parts[next((i for i, part in enumerate(parts) if HOST_BRIDGE.fullmatch(part)), len(parts)) :])


def _link(files: SystemFiles, device: str, which: str) -> str | None:
    speed, width = (files.text(f"{device}/{which}_link_{what}") for what in ("speed", "width"))
    return f"{speed.removesuffix(' PCIe')} x{width}" if speed and width else None


def _read_request(files: SystemFiles, device: str) -> str | None:
    try:
        registers = files.path(f"{device}/config").read_bytes()
    except OSError:
        return None
    if len(registers) < OF_PCI:
        return None
    at, express = registers[0x34], 0x10
    for _ in range(OF_PCI // 4):  # bounded: a broken device may have a circular list of capabilities
        if at in (0, OF_PCI - 1) or registers[at] == express:
            break
        at = registers[at + 1]
    control = int.from_bytes(registers[at + 8 : at + 10], "little") >> 12 & 7
    return str(128 << control) if at and registers[at] == express else None


def _variables(_: SystemFiles, environ: Mapping[str, str]) -> Settings:
    for name, value in sorted(without_secrets(environ).items()):
        if name.startswith(FABRIC_VARIABLES) and not OF_ONE_RUN.search(name):
            yield f"variables.{name}", value


def _together(values: Iterable[str | None]) -> str | None:
    return ", ".join(sorted({value for value in values if value})) or None


def _counted(values: Iterable[str | None]) -> str | None:
    texts = [value for value in values if value]
    each = sorted(set(texts))
    return each[0] if len(each) == 1 else ", ".join(f"{value} on {texts.count(value)}" for value in each) or None


GROUPS = (
    SettingsGroup("kernel", _kernel, "Linux does not show its settings here"),
    SettingsGroup("sysctl", _sysctls, "/proc/sys cannot be read"),
    SettingsGroup("cpu", _cpus, "Linux does not show the CPUs here"),
    SettingsGroup("bios", _bios, "/sys/class/dmi/id does not exist, as in many virtual machines"),
    SettingsGroup("gpu", _driver, "NVIDIA's driver is not loaded"),
    SettingsGroup("modules", _modules, "no module of the kernel has a version of its own"),
    SettingsGroup("nic", _rdma, "no card with RDMA is in /sys/class/infiniband"),
    SettingsGroup("interface", _interfaces, "no interface in /sys/class/net has a device"),
    SettingsGroup("pcie", _pcie, "no GPU and no network card is on the PCI bus"),
    SettingsGroup("variables", _variables, "no variable of NCCL or of a network library is set"),
)
