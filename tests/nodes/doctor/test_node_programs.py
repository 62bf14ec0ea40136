# SPDX-License-Identifier: Apache-2.0
"""File systems, software, containers, the scheduler and the clock: fit, and with one thing wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_node import CHRONY, SOFTWARE, RecordedNode

from llmb import __version__
from llmb.base.missing import Missing
from llmb.base.tools import Output, ask_program
from llmb.launch.scheduler_port import NodeState, Plugin, SchedulerSetup
from llmb.nodes.doctor.check_records import Check, NotChecked
from llmb.nodes.doctor.checks.disk import NOT_MEASURED, DiskFacts, Mount, Rate, disk_checks, mount_of, read_disk
from llmb.nodes.doctor.checks.host import ClockReading, clock_checks
from llmb.nodes.doctor.checks.software import (
    Silent,
    container_checks,
    enroot_folders,
    expanded,
    scheduler_checks,
    software_checks,
)
from llmb.nodes.doctor.facts import FactSource, TargetFacts
from llmb.nodes.doctor.rules import Finding, names_of, rule_of, rules

AREAS = ("scheduler", "container", "disk", "software", "clock")
PYTHON = "/opt/llmb/bin/python"
RATES = {"write": Rate(2**28, 0.2, direct=True), "read": Rate(2**28, 0.1, direct=True)}
LUSTRE = DiskFacts(
    path="/scratch",
    exists=True,
    writable=True,
    device=7,
    free=10**15,
    total=2 * 10**15,
    free_inodes=10**9,
    inodes=10**9,
    mount=Mount("10.0.0.1@o2ib:/scratch", "/scratch", "lustre"),
    rates=RATES,
)
LOCAL = replace(LUSTRE, path="/tmp", device=8, mount=Mount("/dev/md0", "/", "ext4"), free=10**12)
SETUP = SchedulerSetup(
    version="24.05.4",
    traits={
        "tracking": Plugin(value="proctrack/cgroup", fit=True),
        "binding": Plugin(value="task/cgroup,task/affinity", fit=True),
        "selection": Plugin(value="select/cons_tres CR_CORE_MEMORY", fit=True),
        "gpus": Plugin(value="GresTypes=gpu", fit=True),
        "mpi": Plugin(value="pmix_v4", fit=True),
        "containers": Plugin(value="srun has --container-image", fit=True),
    },
    node=NodeState(state="IDLE", usable=True, gpus=8),
)
WANTED = TargetFacts(gpus=8, gpus_by="--gpus", cluster=True, runtime="none")
PYXIS = replace(WANTED, runtime="pyxis")


class Site:
    """What was found on a fit node of a cluster."""

    def __init__(self, root: Path) -> None:
        self.node = RecordedNode(root)
        self.software = SOFTWARE.replace("VERSION", __version__)
        self.node.said[f"{sys.executable} -I"] = json.dumps({"space": {**SPACE, "path": "/scratch/enroot"}})
        self.node.said["enroot version"] = "3.5.0\n"
        self.node.write("etc/enroot/enroot.conf", "ENROOT_DATA_PATH /scratch/enroot/data-$(id -u)\n#ENROOT_X y")
        self.places: dict[str, DiskFacts | Missing] = {"install": LUSTRE, "checkpoints": LUSTRE, "temp": LOCAL}
        self.setup: SchedulerSetup | Silent | Missing = SETUP
        self.file_server: ClockReading | Missing = ClockReading(0.004, 0.001)
        self.target, self.gpus = WANTED, 8

    def found(self) -> dict[str, Finding]:
        self.node.said.setdefault(f"{PYTHON} -c", self.software)
        source = self.node.source
        parts = (
            scheduler_checks(self.setup, "Slurm", self.gpus, self.target),
            container_checks(source, self.target),
            disk_checks(self.places, self.target),
            software_checks(source, PYTHON, self.gpus, self.target),
            clock_checks(source, self.file_server),
        )
        return {finding.name: finding for part in parts for finding in part}


SPACE = {"exists": True, "writable": True, "device": 7, "free": 10**14, "total": 10**15, "free_inodes": 0, "inodes": 0}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_fit_node_passes_every_check(site: Site) -> None:
    found = site.found()
    assert {rule_of(name).name for name in found} == {name for area in AREAS for name in names_of(area)}
    assert {name: one for name, one in found.items() if getattr(one, "status", "") != "pass"} == {
        "disk_space_checkpoints": NotChecked(name="disk_space_checkpoints", reason="on the same file system as install")
    }
    values = {name: one.value for name, one in found.items() if isinstance(one, Check)}
    assert values["disk_space_install"] == "1,000 TB of 2,000 TB free (lustre)"
    assert values["disk_write_install"] == "1,342 MB/s (256 MiB)"
    assert values["disk_shared_install"] == "shared: lustre from 10.0.0.1@o2ib:/scratch"
    assert values["software_cuda"] == "torch for CUDA 12.8, driver up to CUDA 12.8"
    assert values["clock_synchronized"] == "0.000032 s behind (chrony)"
    assert values["clock_file_server"] == "0.004 s ahead of the file server"
    assert values["container_runtime"] == "enroot 3.5.0"


def disk(place: str, **changes: object) -> Callable[[Site], None]:
    def change(site: Site) -> None:
        facts = site.places[place]
        assert isinstance(facts, DiskFacts)
        site.places[place] = replace(facts, **changes)

    return change


def rates(direction: str, **changes: Any) -> Callable[[Site], None]:
    return disk("install", rates={**RATES, direction: RATES[direction]._replace(**changes)})


def file_server(ahead_s: float) -> Callable[[Site], None]:
    return lambda site: setattr(site, "file_server", ClockReading(ahead_s, 0.001))


def trait(name: str, value: str) -> Callable[[Site], None]:
    def change(site: Site) -> None:
        site.setup = SETUP.model_copy(update={"traits": {**SETUP.traits, name: Plugin(value=value, fit=False)}})

    return change


def node_state(**values: object) -> Callable[[Site], None]:
    def change(site: Site) -> None:
        site.setup = SETUP.model_copy(update={"node": NodeState.model_validate(values)})

    return change


def software(before: str, after: str) -> Callable[[Site], None]:
    def change(site: Site) -> None:
        assert before in site.software
        site.software = site.software.replace(before, after)

    return change


def said(program: str, answer: str | Output) -> Callable[[Site], None]:
    return lambda site: site.node.said.update({program: answer})


def containers(change: Callable[[Site], None]) -> Callable[[Site], None]:
    def both(site: Site) -> None:
        site.target = PYXIS
        change(site)

    return both


# The check, its status, parts of its value and of its advice, and what is wrong with the node.
UNFIT: dict[str, tuple[str, str, str, str, Callable[[Site], None]]] = {
    "drained": ("scheduler_node", "fail", "IDLE+DRAIN: bad nic", "resume",
        node_state(state="IDLE+DRAIN", usable=False, reason="bad nic", gpus=8)),
    "Slurm counts more GPUs": ("scheduler_node_gpus", "fail", "9 in Slurm, 8 here", "gres.conf",
        node_state(state="IDLE", usable=True, gpus=9)),
    "silent Slurm": ("scheduler_answer", "warn", "not answer", "ping",
        lambda site: setattr(site, "setup", Silent("Slurm does not answer"))),
    "stray processes": ("scheduler_tracking", "warn", "linuxproc", "cgroup", trait("tracking", "proctrack/linuxproc")),
    "no binding": ("scheduler_binding", "warn", "task/none", "TaskPlugin", trait("binding", "task/none")),
    "whole nodes": ("scheduler_selection", "warn", "linear", "cons_tres", trait("selection", "select/linear")),
    "no GRES": ("scheduler_gpus", "warn", "none", "gpu_request: none", trait("gpus", "GresTypes=none")),
    "no Pyxis": ("scheduler_containers", "fail", "no --container-image", "plugstack",
        containers(trait("containers", "srun has no --container-image"))),
    "no Enroot": ("container_runtime", "fail", "no enroot; cluster_config.yaml has runtime: pyxis", "container.runtime",
        containers(said("enroot version", Output("", "enroot was not found")))),
    "little space for images": ("container_enroot_folders", "warn", "at least 50 GB free (ENROOT_CACHE_PATH",
        "enroot.conf",
        said(f"{sys.executable} -I", json.dumps({"space": {**SPACE, "path": "/x", "free": 50 * 10**9}}))),
    "closed to images": ("container_enroot_folders", "fail",
        "not writable: ENROOT_CACHE_PATH /home/u/.cache/enroot, ENROOT_DATA_PATH /scratch/enroot/data-", "id -u",
        said(f"{sys.executable} -I", json.dumps({"space": {**SPACE, "path": "/x", "writable": False}}))),
    "little space": ("disk_space_temp", "warn", "9 GB of", "TMPDIR", disk("temp", free=9 * 10**9)),
    "full": ("disk_space_temp", "fail", "0.1 GB of", "TMPDIR", disk("temp", free=10**8)),
    "read-only": ("disk_space_temp", "fail", "/tmp is not writable", "permissions", disk("temp", writable=False)),
    "hung": ("disk_space_temp", "fail", "did not answer", "stale",
        lambda site: site.places.update(temp=Missing("the file system did not answer within 60 s"))),
    "few inodes": ("disk_files_temp", "warn", "40,000,000 more files", "df -i", disk("temp", free_inodes=4 * 10**7)),
    "no inodes": ("disk_files_temp", "fail", "9 more files", "df -i", disk("temp", free_inodes=9)),
    "not shared": ("disk_shared_install", "warn", "not shared: xfs from /dev/sda1", "LLMB_INSTALL",
        disk("install", mount=Mount("/dev/sda1", "/", "xfs"))),
    "slow writes": ("disk_write_install", "warn", "134 MB/s", "load", rates("write", seconds=2.0)),
    "no writes": ("disk_write_install", "warn", "nothing was transferred in time", "by hand", rates("write", size=0)),
    "slow reads": ("disk_read_install", "warn", "134 MB/s", "load", rates("read", seconds=2.0)),
    "no interpreter": ("software_python", "fail", "was not found", "cluster_config.yaml",
        said(f"{PYTHON} -c", Output("", f"{PYTHON} was not found"))),
    "old interpreter": ("software_python", "fail", "3.9.18", "3.11", software("3.12.3", "3.9.18")),
    "no llmb": ("software_llmb", "warn", "not installed", "llmb docs install", software(f'"{__version__}"', "null")),
    "another llmb": ("software_llmb", "warn", "0.0.1, but this command", "this ver",
        software(f'"{__version__}"', '"0.0.1"')),
    "no torch": ("software_torch", "warn", "not installed", "'engine'", software('"2.11.0+cu128"', "null")),
    "broken torch": ("software_torch", "fail", "libcudart", "LD_LIBRARY_PATH",
        software('{"cuda"', '{"torch_problem": "OSError: libcudart.so.12: no such file", "cuda"')),
    "torch for CPUs": ("software_cuda", "fail", "without CUDA", "pytorch.org",
        software('"cuda": "12.8"', '"cuda": null')),
    "no libcuda": ("software_cuda", "fail", "no driver", "--nv",
        software('"driver_cuda": "12.8"', '"driver_cuda": null')),
    "old driver": ("software_cuda", "fail", "torch for CUDA 13.0, driver up to CUDA 12.8", "cuda-compat",
        lambda site: [software('"cuda": "12.8"', '"cuda": "13.0"')(site), software('"gpus": 8', '"gpus": 0')(site)][0]),
    "hidden GPUs": ("software_gpus", "fail", "7 of 8", "CUDA_VISIBLE_DEVICES", software('"gpus": 8', '"gpus": 7')),
    "more GPUs": ("software_gpus", "warn", "8 of 7", "CUDA_VISIBLE_DEVICES", lambda site: setattr(site, "gpus", 7)),
    "no kernels": ("software_gpus", "fail", "no kernels for sm_90", "get_arch_list", software('"sm_90", ', "")),
    "no NCCL": ("software_nccl", "fail", "torch has no NCCL", "NCCL", software('"nccl": "2.27.5"', '"nccl": null')),
    "another NCCL": ("software_nccl", "warn", "2.20.3 is loaded", "LD_",
        software('"nccl": "2.27.5"', '"nccl": "2.20.3"')),
    "clock adrift": ("clock_synchronized", "warn", "no (chr", "chronyd",
        said("chronyc", CHRONY.replace("Normal", "Not synchronised"))),
    "clock off": ("clock_synchronized", "warn", "0.500000 s", "makestep",
        said("chronyc", CHRONY.replace("0.000031625", "0.5"))),
    "clock far off": ("clock_synchronized", "fail", "11.0", "makestep",
        said("chronyc", CHRONY.replace("0.000031625", "11.0"))),
    "clock of files": ("clock_file_server", "warn", "1.500 s behind", "clocks", file_server(-1.5)),
    "clock of files far off": ("clock_file_server", "fail", "90.000 s ahead", "clocks", file_server(90.0)),
}  # fmt: skip
FOLLOW = {"no interpreter", "more GPUs", "old driver"}
"""In which another check fails or warns for the same reason."""


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_node_is_found_with_advice(site: Site, case: str) -> None:
    name, status, text, advice, change = UNFIT[case]
    change(site)
    found = site.found()
    finding = found.pop(name)
    assert isinstance(finding, Check)
    assert (finding.status, finding.name) == (status, name)
    assert text in str(finding.value)
    assert advice in str(finding.advice)
    if case not in FOLLOW:
        assert {one.name for one in found.values() if getattr(one, "status", "pass") != "pass"} == set()


def test_every_check_that_can_fail_or_warn_has_a_case() -> None:
    target = {(rule.name, "fail") for rule in rules().values() if rule.area in AREAS and rule.fails_if}
    target |= {(rule.name, "warn") for rule in rules().values() if rule.area in AREAS and rule.warns_if}
    assert target == {(rule_of(name).name, status) for name, status, *_ in UNFIT.values()}


def test_places_on_one_file_system_are_judged_by_what_all_need(site: Site) -> None:
    for place in ("install", "checkpoints"):
        disk(place, free=60 * 10**9)(site)
    finding = site.found()["disk_space_install"]
    assert isinstance(finding, Check)
    assert finding.status == "warn"
    assert str(finding.value).endswith("free (lustre), less than the 200 GB for checkpoints")


def test_a_container_brings_its_own_software(site: Site) -> None:
    site.target = PYXIS
    site.software = site.software.replace('"cuda": "12.8"', '"cuda": null')
    found = site.found()
    assert {type(found[name]) for name in names_of("software")[2:]} == {NotChecked}


def test_a_compatibility_package_makes_an_old_driver_fit(site: Site) -> None:
    site.software = site.software.replace('"cuda": "12.8"', '"cuda": "13.0"')
    finding = site.found()["software_cuda"]
    assert isinstance(finding, Check)
    assert (finding.status, finding.value) == (
        "pass",
        "torch for CUDA 13.0, driver up to CUDA 12.8, with a compatibility package",
    )


def test_without_a_scheduler_nothing_of_it_is_checked(site: Site) -> None:
    site.setup = Missing("scontrol was not found")
    found = site.found()
    assert [found[name] for name in names_of("scheduler")] == [
        NotChecked(name=name, reason="scontrol was not found") for name in names_of("scheduler")
    ]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("/scratch/${USER}/enroot", "/scratch/u/enroot"),
        ("$HOME/enroot", "/home/u/enroot"),
        ("${XDG_CACHE_HOME:-${HOME}/.cache}/enroot", "/home/u/.cache/enroot"),
        ("/run/enroot/user-$(id -u)", f"/run/enroot/user-{os.getuid()}"),
        ("/run/$UID", f"/run/{os.getuid()}"),
        ("$(mktemp -d)", None),
        ("relative", None),
        ("", None),
    ],
)
def test_settings_of_enroot_are_expanded(value: str, path: str | None) -> None:
    found = expanded(value, {"USER": "u", "HOME": "/home/u"})
    assert found == (Path(path) if path else None)


def test_enroot_folders_are_those_of_its_configuration(site: Site) -> None:
    site.node.write("etc/enroot/enroot.conf.d/10-site.conf", "ENROOT_TEMP_PATH  /local\nENROOT_DATA_PATH /local/data")
    assert {setting: str(path) for setting, path in enroot_folders(site.node.source).items()} == {
        "ENROOT_CACHE_PATH": "/home/u/.cache/enroot",
        "ENROOT_DATA_PATH": "/local/data",
        "ENROOT_TEMP_PATH": "/local",
    }


def test_of_an_unknown_fuse_it_is_not_known_whether_it_is_shared(site: Site) -> None:
    for kind, seen in (("fuse.juicefs", "pass"), ("fuse.other", None)):
        disk("install", mount=Mount("other", "/scratch", kind))(site)
        assert getattr(site.found()["disk_shared_install"], "status", None) == seen


MOUNTS = r"""/dev/md0 / ext4 rw 0 0
10.0.0.1:/home /home nfs4 rw,vers=4.2 0 0
//server/a\040b /mnt/a\040b cifs rw 0 0
tmpfs /home tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "ext4"), ("/opt", "ext4"), ("/home/u", "tmpfs"), ("/homes", "ext4"), ("/mnt/a b/c", "cifs")],
)
def test_a_path_is_on_the_last_mount_at_the_longest_folder(path: str, kind: str) -> None:
    found = mount_of(path, MOUNTS)
    assert found
    assert found.kind == kind


def test_damaged_output_is_no_crash(site: Site) -> None:
    for program, text in ((f"{PYTHON} -c", site.software), ("chronyc", CHRONY), (f"{sys.executable} -I", "{}")):
        for end in range(len(text)):
            site.software = text[:end] if program.startswith(PYTHON) else site.software
            site.node.said[program] = text[:end]
            source = site.node.source
            list(software_checks(source, PYTHON, 8, WANTED))
            list(clock_checks(source, NOT_MEASURED))
            read_disk(source, Path("/scratch"), 1)


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    facts = read_disk(FactSource(), tmp_path, 8 * 2**20)
    assert isinstance(facts, DiskFacts)
    assert not isinstance(facts.rates, Missing)
    assert {direction: rate.size for direction, rate in facts.rates.items()} == {"write": 8 * 2**20, "read": 8 * 2**20}
    assert facts.path == str(tmp_path.resolve())
    assert facts.mount
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["a", "x" * 300], ids=["missing", "not to be looked at"])
def test_the_nearest_folder_stands_in_for_one_that_is_missing(tmp_path: Path, name: str) -> None:
    facts = read_disk(FactSource(), tmp_path / name / "b", 0)
    assert isinstance(facts, DiskFacts)
    assert (facts.exists, facts.path) == (False, str(tmp_path.resolve()))
    assert facts.rates == NOT_MEASURED


def test_a_program_that_does_not_end_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that ignores SIGTERM. Its time is counted from when it has said all: a shell may start slowly."""
    ready = tmp_path / "pid"
    start = subprocess.Popen

    def started(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        process = start(*arguments, **options)
        assert _soon(ready.exists)
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    script = f"trap '' TERM; echo said; sleep 1000 & echo $! > {ready}.new; mv {ready}.new {ready}; wait; sleep 1000"
    found = ask_program(["sh", "-c", script], 0.5)
    assert found == Output("said\n", "sh did not answer within 0.5 s", timed_out=True)
    child = int(ready.read_text())
    if not _soon(lambda: not _runs(child)):
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child of the program still runs")


def _soon(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["no-such-program"], "no-such-program was not found"),
        (["/"], "/ cannot be started: Permission denied"),
        (["sh", "-c", "echo one >&2; echo two >&2; exit 3"], "sh: two"),
        (["sh", "-c", "echo one; exit 3"], "sh: one"),
        (["sh", "-c", "exit 3"], "sh: exit code 3 with no output"),
    ],
)
def test_a_program_that_fails_says_why(command: list[str], problem: str) -> None:
    assert ask_program(command, 60).problem == problem


def test_rules_are_named_once_and_say_what_to_do() -> None:
    found: Mapping[str, object] = rules()
    assert len(found) > 60
    for rule in rules().values():
        assert (rule.advice is None) == (rule.fails_if is None and rule.warns_if is None), rule.name
        assert not rule.thresholds.model_dump(exclude_none=True) or rule.source, rule.name
