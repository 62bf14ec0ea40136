# SPDX-License-Identifier: Apache-2.0
"""Checks of the file systems to which runs write."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llmb.base.missing import Missing
from llmb.base.shown_text import counted
from llmb.nodes.doctor.facts import FactSource, TargetFacts, printed_documents
from llmb.nodes.doctor.rules import Finding, gb, rule

PROBE = Path(__file__).with_name("disk_probe.py")
DIRECTION_S = 15.0
"""Time limit in seconds for writing, and for reading; rates are computed from the bytes transferred by then."""
LIMIT_S, SPACE_S = 60.0, 20.0
NOT_MEASURED = Missing("not measured: --no-disk")
IN_MEMORY = frozenset(["tmpfs", "ramfs"])
SAME_EVERYWHERE = ("install", "images", "checkpoints")
"""Places that every node of a job must see."""


class Mount(NamedTuple):
    device: str
    folder: str
    kind: str

    @property
    def shared(self) -> bool:
        return self.kind in rule("disk_shared").kinds


class Rate(NamedTuple):
    """Bytes and seconds of a transfer; ``direct`` is True if it bypassed the page cache."""

    size: int
    seconds: float
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """Facts about the file system of a folder, or of its nearest existing parent; sizes are in bytes."""

    path: str
    exists: bool
    writable: bool
    device: int
    free: int
    total: int
    free_inodes: int
    inodes: int
    """The number of inodes; 0 if the file system has no fixed number."""
    mount: Mount | None
    rates: Mapping[str, Rate] | Missing
    """Rates by the keys ``write`` and ``read``."""


def read_disk(source: FactSource, folder: Path, size: int) -> DiskFacts | Missing:
    """Read facts of a folder's disk; if ``size`` is not 0, measure rates with a file of that many bytes."""
    command = [sys.executable, "-I", str(PROBE), str(folder), str(size), str(DIRECTION_S)]
    done = source.ask(command, LIMIT_S if size else SPACE_S)
    document = printed_documents(done.text)
    space = document.get("space")
    problem = (done.problem or "").replace(sys.executable, "the file system", 1) if done.timed_out else done.problem
    if space is None:
        return Missing(problem or "the folder cannot be measured")
    mount = mount_of(space["path"], source.text("/proc/mounts") or "")
    return DiskFacts(**space, mount=mount, rates=_rates(document, problem) if size else NOT_MEASURED)


def _rates(document: Mapping[str, Any], problem: str | None) -> Mapping[str, Rate] | Missing:
    if "rates" in document:
        return {direction: Rate(*figures) for direction, figures in document["rates"].items()}
    return Missing(f"writing or reading failed: {document.get('problem') or problem or 'it ended early'}")


def mount_of(path: str, mounts: str) -> Mount | None:
    """Return the mount in ``mounts``, the text of /proc/mounts, that contains ``path``; of several at one mount point,
    the last. None if no mount contains it."""
    rows = (line.split() for line in mounts.splitlines())
    holding = [Mount(row[0], _plain(row[1]), row[2]) for row in rows if len(row) >= 3]
    fits = [mount for mount in holding if Path(path).is_relative_to(mount.folder)]
    return max(reversed(fits), key=lambda mount: len(mount.folder), default=None)


def _plain(text: str) -> str:
    """Decode the octal escapes of /proc/mounts."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


def disk_checks(
    places: Mapping[str, DiskFacts | Missing], target: TargetFacts, gpu_count: int = 0
) -> Iterator[Finding]:
    """Check the disks; a file system with several of the folders is checked once, for the largest of their needs."""
    together: dict[int, list[str]] = {}
    for place, facts in places.items():
        if isinstance(facts, Missing):
            yield rule("disk_space").check("fail", facts.reason, "hung", of=place)
        elif not facts.writable and (facts.exists or place in SAME_EVERYWHERE):
            yield rule("disk_space").check("fail", f"{facts.path} is not writable", "not_writable", of=place)
        elif facts.device in together:
            first = together[facts.device][0]
            together[facts.device].append(place)
            yield rule("disk_space").skipped(f"on the same file system as {first}", of=place)
        else:
            together[facts.device] = [place]
    for names in together.values():
        facts = places[names[0]]
        if not isinstance(facts, Missing):
            yield from _file_system(names, facts, target, gpu_count)


def _file_system(places: Sequence[str], facts: DiskFacts, target: TargetFacts, gpu_count: int) -> Iterator[Finding]:
    of, place = rule("disk_space"), places[0]
    on = f" ({facts.mount.kind})" if facts.mount else ""
    missing = "" if facts.exists else f"; {facts.path} is the nearest existing folder"
    text = f"{gb(facts.free)} of {gb(facts.total)} free{on}"
    status = of.thresholds.status(facts.free / 1e9)
    trains = gpu_count or target.gpus or target.cluster
    needs = {name: of.limits.get(name if trains else "without_gpus", 0) for name in places}
    most = max(needs, key=lambda name: needs[name])
    if status == "pass" and facts.free / 1e9 < needs[most]:
        status, text = "warn", f"{text}, less than the {needs[most]:g} GB for {most}"
    yield of.check(status, f"{text}{missing}", of=place)
    if facts.inodes:
        percent = 100 * facts.free_inodes / facts.inodes
        yield rule("disk_files").measured(percent, f"{counted(facts.free_inodes, 'more file')} possible", of=place)
    if place in SAME_EVERYWHERE:
        yield _shared(place, facts.mount, target)
    yield _rate("write", place, facts)
    yield _rate("read", place, facts)


def _shared(place: str, mount: Mount | None, target: TargetFacts) -> Finding:
    of = rule("disk_shared")
    if mount is None:
        return of.skipped("the mount is not in /proc/mounts", of=place)
    where = f"{mount.kind} from {mount.device}"
    if mount.shared:
        return of.passed(f"shared: {where}", of=place)
    if mount.kind.startswith("fuse"):
        return of.skipped(f"it is unknown whether other nodes see {where}", of=place)
    if target.cluster:
        return of.check("warn", f"not shared: {where}", of=place)
    return of.skipped(f"on a local disk ({mount.kind}), and cluster_config.yaml describes no cluster", of=place)


def _rate(direction: Literal["write", "read"], place: str, facts: DiskFacts) -> Finding:
    of = rule(f"disk_{direction}")
    if facts.rates == NOT_MEASURED:
        return of.skipped(NOT_MEASURED.reason, of=place)
    if isinstance(facts.rates, Missing):
        return of.check("warn", facts.rates.reason, "failed", of=place)
    rate = facts.rates[direction]
    if not rate.size or not rate.seconds:
        return of.check("warn", "nothing was transferred in time", "failed", of=place)
    mb_s = rate.size / 1e6 / rate.seconds
    how = "" if rate.direct else ", through the page cache"
    if facts.mount and facts.mount.kind in IN_MEMORY:
        how = ", memory, not a disk"
    return of.measured(mb_s, f"{mb_s:,.0f} MB/s ({rate.size / 2**20:,.0f} MiB{how})", of=place)
