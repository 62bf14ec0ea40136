# SPDX-License-Identifier: Apache-2.0
"""How Slurm is set up, in the formats of its commands, and on the test cluster."""

from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import GPUS, NODES, SlurmCluster

from llmb.base.errors import EnvironmentProblem, InfrastructureError, UsageError
from llmb.launch.scheduler_port import NodeState
from llmb.launch.slurm.offer import (
    compress,
    container_trait,
    expand,
    mpi_trait,
    parse_node,
    parse_settings,
    read_nodes,
    read_setup,
    traits_of,
)

CONFIG = """Configuration data as of 2026-11-22T11:20:31
AccountingStorageHost   = db1
GresTypes               = gpu,nvme
JobAcctGatherType       = (null)
MpiDefault              = pmix
ProctrackType           = proctrack/cgroup
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_CONF              = /etc/slurm/slurm.conf
SLURM_VERSION           = 24.05.4
TaskPlugin              = task/cgroup,task/affinity
TaskPluginParam         = (null type)

Cgroup Support Configuration:
ConstrainDevices        = yes

Slurmctld(primary) at head1 is UP
"""
NODE = (
    "NodeName=node7 Arch=x86_64 CoresPerSocket=56 CPUAlloc=0 CPUEfctv=224 CPUTot=224 CPULoad=0.52"
    " AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:h100:8(S:0-1) NodeAddr=node7 NodeHostName=node7"
    " Version=24.05.4 OS=Linux 5.15.0-1053-nvidia #54-Ubuntu SMP Wed Apr 3 2024 RealMemory=2051000 AllocMem=0"
    " FreeMem=1990000 Sockets=2 Boards=1 State={state} ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A"
    " Partitions=gpu BootTime=2026-11-12T10:00:00 CfgTRES=cpu=224,mem=2051000M,billing=224,gres/gpu=8 AllocTRES="
)
MPI = """MPI plugin types are...
\tnone
\tcray_shasta
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v4,pmix_v5
"""


def test_settings_are_read_as_scontrol_prints_them() -> None:
    settings = parse_settings(CONFIG)
    assert settings["SLURM_VERSION"] == "24.05.4"
    assert settings["TaskPlugin"] == "task/cgroup,task/affinity"
    assert "JobAcctGatherType" not in settings


def test_a_fit_configuration() -> None:
    traits = traits_of(parse_settings(CONFIG))
    assert {name: (plugin.value, plugin.fit) for name, plugin in traits.items()} == {
        "tracking": ("proctrack/cgroup", True),
        "binding": ("task/cgroup,task/affinity", True),
        "selection": ("select/cons_tres CR_CORE_MEMORY", True),
        "gpus": ("GresTypes=gpu,nvme", True),
    }


@pytest.mark.parametrize(
    ("trait", "before", "after", "value"),
    [
        ("tracking", "proctrack/cgroup", "proctrack/linuxproc", "proctrack/linuxproc"),
        ("binding", "task/cgroup,task/affinity", "(null)", "task/none"),
        ("selection", "select/cons_tres", "select/linear", "select/linear CR_CORE_MEMORY"),
        ("gpus", "gpu,nvme", "(null)", "GresTypes=none"),
        ("gpus", "gpu,nvme", "gpu_mem", "GresTypes=gpu_mem"),
    ],
)
def test_an_unfit_configuration(trait: str, before: str, after: str, value: str) -> None:
    traits = traits_of(parse_settings(CONFIG.replace(before, after)))
    assert {name for name, plugin in traits.items() if not plugin.fit} == {trait}
    assert {name: plugin.value for name, plugin in traits.items()}[trait] == value


@pytest.mark.parametrize(
    ("listed", "value"),
    [
        (MPI, "none, cray_shasta, pmi2, pmix, pmix_v4, pmix_v5, default pmix"),
        ("MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n", "cray_shasta, none, pmi2, default pmix"),
        ("srun: MPI types are...\nsrun: pmix_v3\nsrun: none\n", "pmix_v3, none, default pmix"),
    ],
)
def test_protocols_of_mpi(listed: str, value: str) -> None:
    assert mpi_trait(listed, "pmix")["mpi"].value == value
    assert mpi_trait("", "pmix") == {}


def test_pyxis_is_seen_in_the_help_of_srun() -> None:
    usage = "Usage: srun [OPTIONS(0)... [executable(0) [args(0)...]]]\n      --container=PATH  Path to OCI bundle\n"
    assert not container_trait(usage)["containers"].fit
    pyxis = "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n"
    assert container_trait(usage + pyxis)["containers"].fit
    assert container_trait("\n") == {}


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE", True),
        ("MIXED+PLANNED", True),
        ("ALLOCATED+COMPLETING", True),
        ("IDLE+CLOUD", True),
        ("IDLE*", False),
        ("IDLE+DRAIN", False),
        ("MIXED+DRAIN", False),
        ("DOWN", False),
        ("DOWN*+DRAIN", False),
        ("IDLE+NOT_RESPONDING", False),
        ("IDLE+MAINTENANCE+RESERVED", False),
        ("DOWN+DRAINED:firmware", False),
    ],
)
def test_states_of_nodes(state: str, usable: bool) -> None:
    found = parse_node(NODE.format(state=state))
    assert found == NodeState(state=state, usable=usable, gpus=8, partitions=("gpu",))


def test_the_reason_is_without_who_gave_it() -> None:
    line = NODE.format(state="IDLE+DRAIN") + " Reason=bad nic: 2 of 8 [root@2026-11-22T10:00:00]\n"
    found = parse_node(line)
    assert found
    assert found.reason == "bad nic: 2 of 8"


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("(null)", None), ("gpu:4", 4), ("gpu_mem:16280,gpu:1", 1), ("gpu:h100:4(S:0),gpu:h100:4(S:1),nvme:2", 8)],
)
def test_gpus_of_a_node(gres: str, gpus: int | None) -> None:
    found = parse_node(NODE.format(state="IDLE").replace("gpu:h100:8(S:0-1)", gres))
    assert found
    assert found.gpus == gpus


def test_what_is_cut_off_makes_no_other_trait_and_no_usable_node() -> None:
    line = NODE.format(state="IDLE+DRAIN") + " Reason=bad nic [root@2026-11-22T10:00:00]\n"
    for text in (CONFIG, MPI, line):
        for end in range(0, len(text), 3):
            cut = text[:end]
            assert {*traits_of(parse_settings(cut))} <= {"tracking", "binding", "selection", "gpus"}
            assert {*mpi_trait(cut, "")} <= {"mpi"} and {*container_trait(cut)} <= {"containers"}
            node = parse_node(cut)
            assert node is None or not node.usable or "DRAIN" not in cut


def test_commands_that_fail_leave_out_their_part(program: Callable[[str, str], None]) -> None:
    """srun of another version, a node that Slurm does not know."""
    script = 'case "$*" in *config) echo "$CONFIG";; *) echo "Node x not found" >&2; exit 1;; esac'
    program("scontrol", f"CONFIG='{CONFIG}'\n{script}")
    program("srun", "echo 'srun: error: unrecognized option' >&2; exit 1")
    setup = read_setup("x.example.org", 60)
    assert (setup.version, setup.node) == ("24.05.4", None)
    assert {*setup.traits} == {"tracking", "binding", "selection", "gpus"}


def test_a_short_name_is_tried_too(program: Callable[[str, str], None]) -> None:
    node = NODE.format(state="IDLE")
    script = 'case "$*" in *config) echo "SLURM_VERSION = 24.05.4";; *\\ node7) echo "$NODE";; *) exit 1;; esac'
    program("scontrol", f"NODE='{node}'\n{script}")
    program("srun", f"MPI='{MPI}'\n" + 'case "$1" in --help) echo usage;; *) echo "$MPI";; esac')
    setup = read_setup("node7.example.org", 60)
    assert setup.node == NodeState(state="IDLE", usable=True, gpus=8, partitions=("gpu",))
    assert setup.traits["mpi"].fit


def test_no_slurm_and_a_silent_one_differ(program: Callable[[str, str], None]) -> None:
    program("scontrol", "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1")
    with pytest.raises(EnvironmentProblem):
        read_setup("x", 60)
    program("scontrol", "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(InfrastructureError):
        read_setup("x", 60)


@pytest.mark.slurm
def test_the_test_cluster_is_read(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    setup = read_setup(NODES[0], 60)
    assert setup.version
    assert {"tracking", "binding", "selection", "gpus", "mpi", "containers"} == {*setup.traits}
    assert not setup.traits["containers"].fit
    assert setup.node
    assert (setup.node.usable, setup.node.gpus) == (True, GPUS)
    assert read_setup("no-such-node", 60).node is None


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        ([], ""),
        (["login"], "login"),
        (["node2", "node1", "node2"], "node[1-2]"),
        (["node1", "node3", "node4", "node5", "node9"], "node[1,3-5,9]"),
        (["gpu-08", "gpu-09", "gpu-10"], "gpu-[08-10]"),
        (["r1n1-ib", "r1n2-ib", "r2n1-ib", "a"], "a,r1n[1-2]-ib,r2n1-ib"),
        (["n007", "n7"], "n7,n007"),
    ],
)
def test_names_of_nodes_become_a_list_and_names_again(names: list[str], listed: str) -> None:
    assert compress(names) == listed
    assert sorted(expand(listed)) == sorted(set(names))


@pytest.mark.slurm
def test_a_list_is_as_slurm_itself_writes_it(slurm: SlurmCluster) -> None:
    names = [f"node{number:03d}" for number in (1, 2, 3, 7, 8, 99, 100, 101)]
    shown = slurm.run("scontrol", "show", "hostlist", ",".join(names)).stdout.strip()
    assert compress(names) == shown
    assert slurm.run("scontrol", "show", "hostnames", compress(names)).stdout.split() == names


def test_the_states_of_many_nodes_take_one_call(program: Callable[[str, str], None], tmp_path: Path) -> None:
    lines = [NODE.replace("node7", f"node{n}").format(state="IDLE") for n in range(1, 5)]
    (tmp_path / "nodes").write_text("\n".join(lines) + "\n")
    program("scontrol", f'echo "$@" >> {tmp_path}/asked; cat {tmp_path}/nodes')
    program("sinfo", "printf 'gpu|node[1-2]\\ncpu|node3\\ngpu|node4\\n'")
    assert [*read_nodes("node[1-4]", None, 60)] == [*read_nodes(None, "cpu,gpu", 60)] == [*expand("node[1-4]")]
    assert [*read_nodes(None, "gpu", 60)] == ["node1", "node2", "node4"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [*["--oneliner show node node[1-4]"] * 2, "--oneliner show node node[1-2,4]"]
    with pytest.raises(UsageError, match="no node node5"):
        read_nodes("node[4-5]", None, 60)
    with pytest.raises(UsageError, match="unknown partition 'gpus'"):
        read_nodes(None, "cpu,gpus", 60)
    for text in ("node[1-", "--help", "node[2-1]", "", "node1;rm"):
        with pytest.raises(UsageError):
            read_nodes(text, None, 60)
