# SPDX-License-Identifier: Apache-2.0
"""Checks of runtimes of containers."""

from collections.abc import Iterator

from llmb.health.checks.words import gb, listed
from llmb.health.facts.container import ContainerFacts
from llmb.health.facts.source import Missing
from llmb.health.rules import Finding, rule
from llmb.health.wanted import WantedFacts

PROGRAMS = {"pyxis": ("enroot",), "apptainer": ("apptainer", "singularity")}
"""Of which a runtime of cluster_config.yaml needs one."""


def container_checks(facts: ContainerFacts, wanted: WantedFacts) -> Iterator[Finding]:
    of = rule("container_runtime")
    shown = listed(f"{name} {version}" for name, version in facts.versions.items())
    needed = PROGRAMS.get(wanted.runtime, ())
    if needed and not set(needed) & facts.versions.keys():
        has = f"; only {shown}" if shown else ""
        yield of.found("fail", f"no {needed[0]}{has}; cluster_config.yaml has runtime: {wanted.runtime}")
    elif facts.versions:
        yield of.passed(shown)
    else:
        yield of.skipped("no runtime of containers is installed, and none is asked for")
    yield _enroot(facts)


def _enroot(facts: ContainerFacts) -> Finding:
    of = rule("container_enroot_folders")
    if isinstance(facts.enroot, Missing):
        return of.skipped(facts.enroot.reason)
    known = [folder for folder in facts.enroot if folder.path]
    if not known:
        return of.skipped("its settings cannot be read without a shell")
    seen = [(folder, folder.disk) for folder in known if not isinstance(folder.disk, Missing)]
    hung = [f"{one.setting} {one.path}: {one.disk.reason}" for one in known if isinstance(one.disk, Missing)]
    if hung:
        return of.found("fail", listed(hung), "closed")
    closed = [f"{folder.setting} {folder.path}" for folder, disk in seen if not disk.writable]
    if closed:
        return of.found("fail", f"not writable: {listed(closed)}", "closed")
    least, disk = min(seen, key=lambda pair: pair[1].free)
    return of.measured(disk.free / 1e9, f"at least {gb(disk.free)} free ({least.setting} {least.path})")
