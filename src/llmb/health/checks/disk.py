# SPDX-License-Identifier: Apache-2.0
"""Checks of the folders that runs write to, and of the clock by which their files are dated."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from llmb.health.checks.words import counted, gb
from llmb.health.facts.disk import DiskFacts, Mount, Rates
from llmb.health.facts.source import Missing
from llmb.health.rules import Finding, rule
from llmb.health.wanted import WantedFacts

IN_MEMORY = frozenset(["tmpfs", "ramfs"])
SAME_EVERYWHERE = ("install", "images", "checkpoints")
"""Places that every node of a job has to see."""
Direction = Literal["write", "read"]


def is_shared(mount: Mount | None) -> bool:
    return mount is not None and mount.kind in rule("disk_shared").kinds


def disk_checks(
    places: Mapping[str, DiskFacts | Missing], wanted: WantedFacts, gpu_count: int = 0
) -> Iterator[Finding]:
    """A file system that several places are on is judged once, under the first, by what all of them need."""
    together: dict[int, list[str]] = {}
    for place, facts in places.items():
        if isinstance(facts, Missing):
            yield rule("disk_space").found("fail", facts.reason, "hung", of=place)
        elif not facts.writable and (facts.exists or place in SAME_EVERYWHERE):
            yield rule("disk_space").found("fail", f"{facts.path} is not writable", "not_writable", of=place)
        else:
            together.setdefault(facts.device, []).append(place)
    for first, *others in together.values():
        facts = places[first]
        if not isinstance(facts, Missing):
            yield from _file_system([first, *others], facts, wanted, gpu_count)
        for place in others:
            yield rule("disk_space").skipped(f"on the same file system as {first}", of=place)


def _file_system(places: Sequence[str], facts: DiskFacts, wanted: WantedFacts, gpu_count: int) -> Iterator[Finding]:
    of, place = rule("disk_space"), places[0]
    on = f" ({facts.mount.kind})" if facts.mount else ""
    missing = "" if facts.exists else f"; {facts.path} is the nearest folder that exists"
    text = f"{gb(facts.free)} of {gb(facts.total)} free{on}"
    status = of.thresholds.status(facts.free / 1e9)
    trains = gpu_count or wanted.gpus or wanted.cluster
    needs = {name: of.limits.get(name if trains else "without_gpus", 0) for name in places}
    most = max(needs, key=lambda name: needs[name])
    if status == "pass" and facts.free / 1e9 < needs[most]:
        status, text = "warn", f"{text}, less than the {needs[most]:g} GB for {most}"
    yield of.found(status, f"{text}{missing}", of=place)
    if facts.inodes:
        percent = 100 * facts.free_inodes / facts.inodes
        yield rule("disk_files").measured(percent, f"{counted(facts.free_inodes, 'more file')} possible", of=place)
    if place in SAME_EVERYWHERE:
        yield _shared(place, facts.mount, wanted)
    yield _rate("write", place, facts.rates, facts.mount)
    yield _rate("read", place, facts.rates, facts.mount)


def _shared(place: str, mount: Mount | None, wanted: WantedFacts) -> Finding:
    of = rule("disk_shared")
    if mount is None:
        return of.skipped("its mount is not in /proc/mounts", of=place)
    where = f"{mount.kind} from {mount.device}"
    if is_shared(mount):
        return of.passed(f"shared: {where}", of=place)
    if mount.kind.startswith("fuse"):
        return of.skipped(f"whether other nodes see {where} is not known", of=place)
    if wanted.cluster:
        return of.found("warn", f"not shared: {where}", of=place)
    return of.skipped(f"on a local disk ({mount.kind}), and cluster_config.yaml describes no cluster", of=place)


def _rate(direction: Direction, place: str, rates: Rates | Missing, mount: Mount | None) -> Finding:
    of = rule(f"disk_{direction}")
    if isinstance(rates, Missing):
        if rates.reason.startswith("not measured"):
            return of.skipped(rates.reason, of=place)
        return of.found("warn", rates.reason, "failed", of=place)
    wrote = direction == "write"
    size, seconds = (rates.written, rates.write_s) if wrote else (rates.read, rates.read_s)
    direct = rates.direct if wrote else rates.direct_read
    if not size or not seconds:
        return of.found("warn", "no byte in time", "failed", of=place)
    mb_s = size / 1e6 / seconds
    how = "memory, no disk" if mount and mount.kind in IN_MEMORY else "" if direct else "through the page cache"
    text = f"{mb_s:,.0f} MB/s ({size / 2**20:,.0f} MiB{', ' if how else ''}{how})"
    return of.measured(mb_s, text, of=place)
