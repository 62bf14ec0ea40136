# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of its own on this machine: a controller and its nodes with stand-ins for GPUs, all below one folder."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from free_ports import free_ports
from slurm_reaper import kill_processes_of

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
HOW_TO_GET = "Slurm is not installed: apt-get install slurmctld slurmd slurm-client munge (as .ci/run does)"
# Debian puts daemons where other users' PATH does not look.
SEARCHED = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
NODES = ("node1", "node2")
GPUS = 8
STOPPED = ("slurmctld", "slurmdbd", "mariadbd", "munged")
"""Daemons in the order in which they are ended, after those of nodes."""
READY_S = 300
STOPS_WITHIN_S = 60
"""A controller that is killed earlier may not have saved what it knows of jobs."""
REAPER = Path(__file__).with_name("slurm_reaper.py")

# cred_expire is also how long a requeued job waits; MinJobAge keeps ended jobs known; too short an
# UnkillableStepTimeout drains nodes when the controller restarts under a step. Memory and cores are posed, and nothing
# holds jobs to them.
CONFIG = """ClusterName=llmbtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
PlugStackConfig={root}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
DefMemPerCPU=1000
MinJobAge={min_job_age_s}
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
UnkillableStepTimeout=120
PropagateResourceLimits=NONE
{accounting}
{nodes}
PartitionName=gpu Nodes={names} Default=YES MaxTime=1-00:00:00 DefaultTime=01:00:00 State=UP
PartitionName=debug Nodes=node1 MaxTime=00:30:00 State=UP
"""
NODE = (
    "NodeName={name} NodeHostName={name} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=1000000 Gres=gpu:h100:{gpus}"
)


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]


@dataclass
class SlurmCluster:
    """Starts and ends its own processes, by the ids it got when it started them; works as any user."""

    root: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    min_job_age_s: int = 3600
    """For so long the controller remembers a job that has ended."""
    nodes: tuple[str, ...] = NODES
    reaper: "subprocess.Popen[bytes] | None" = None

    @property
    def environ(self) -> dict[str, str]:
        """What Slurm's commands need to speak to this cluster; nothing of a job that the tests may run in."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return {**own, "PATH": SEARCHED, "SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self) -> None:
        self._configure()
        command = [sys.executable, str(REAPER), str(self.root)]
        self.reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self.spawn(
            "munged",
            f"--socket={self.root}/munge/socket",
            f"--key-file={self.root}/munge/key",
            f"--pid-file={self.root}/munge/pid",
            f"--log-file={self.root}/munge/log",
            f"--seed-file={self.root}/munge/seed",
            "--num-threads=2",
            "--foreground",
            "--force",  # pytest's folders are closed to other users, who have no business with this socket
        )
        self.wait_for("munged", (self.root / "munge" / "socket").exists)
        self.start_accounts()
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_for("nodes", self._nodes_ready)

    def start_accounts(self) -> None:
        """This cluster keeps none."""

    def start_controller(self) -> None:
        self.spawn("slurmctld", "-D", "-f", str(self.root / "slurm.conf"))

    def start_node(self, node: str) -> None:
        self.spawn("slurmd", "-D", "-N", node, "-f", str(self.root / "slurm.conf"), name=node)

    def revive(self) -> None:
        """Starts nodes again whose daemon crashed: Debian's slurmd sometimes aborts when many steps start at once."""
        crashed = [name for name in self.nodes if name in self.daemons and self.daemons[name].poll() is not None]
        for node in crashed:
            self.start_node(node)
            self.run("scontrol", "update", f"nodename={node}", "state=resume")
        if crashed:
            self.wait_for("nodes", self._nodes_ready)

    def stop(self) -> None:
        """Cancels what runs, then ends the daemons; step daemons that are left are killed with what they lead.

        A session that is killed does not get here; the reaper then does the same.
        """
        if "slurmctld" in self.daemons:
            self.run("scancel", f"--user={os.geteuid()}")
            self.wait_for("the end of jobs", lambda: not self.run("squeue", "-h").stdout.strip(), fails=False)
        for name in (*self.nodes, *STOPPED):
            self.end(name)
        kill_processes_of(self.root)
        if self.reaper:
            self.reaper.communicate()

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends a daemon, or kills it."""
        process = self.daemons.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def run(self, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=300, check=False, **options
        )

    def spawn(self, program: str, *arguments: str, name: str | None = None) -> None:
        path = shutil.which(program, path=SEARCHED)
        assert path, HOW_TO_GET
        with (self.root / f"{name or program}.out").open("ab") as talk:
            self.daemons[name or program] = subprocess.Popen(
                [path, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=talk,
                stderr=talk,
                start_new_session=True,
            )

    def wait_for(self, what: str, ready: Callable[[], bool], *, fails: bool = True, within_s: float = READY_S) -> None:
        end = time.monotonic() + within_s
        while not ready():
            dead = [name for name, process in self.daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > end:
                assert not fails, f"{what} not ready after {within_s} s, ended: {dead}\n{self.talk()}"
                return
            time.sleep(0.1)

    def talk(self) -> str:
        """What the daemons said last, for a test that fails."""
        files = [*self.root.glob("*.log"), *self.root.glob("*.out")]
        return "\n".join(f"== {file.name}\n" + "\n".join(file.read_text().splitlines()[-15:]) for file in files)

    def _nodes_ready(self) -> bool:
        lines = self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T").stdout.split("\n")
        return sum(line.endswith((" idle", " mixed", " allocated", " completing")) for line in lines) == len(self.nodes)

    def _configure(self) -> None:
        for folder in ("munge", "state", "dev", *(f"spool-{node}" for node in self.nodes)):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        (self.root / "munge").chmod(0o755)
        key = self.root / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        for number in range(GPUS):
            # slurmd wants character devices.
            (self.root / "dev" / f"gpu{number}").symlink_to("/dev/null")
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        host, ports = socket.gethostname().split(".")[0], free_ports(2 + len(self.nodes))
        lines = (NODE.format(name=name, port=port, gpus=GPUS) for name, port in zip(self.nodes, ports[2:], strict=True))
        text = CONFIG.format(
            nodes="\n".join(lines),
            names=",".join(self.nodes),
            host=host,
            ports=ports,
            root=self.root,
            user=user,
            min_job_age_s=self.min_job_age_s,
            accounting=self._configure_accounts(host, user, ports[1]),
        )
        (self.root / "slurm.conf").write_text(text)
        gres = f"NodeName={','.join(self.nodes)} Name=gpu Type=h100 File={self.root}/dev/gpu[0-{GPUS - 1}]\n"
        (self.root / "gres.conf").write_text(gres)
        (self.root / "plugstack.conf").write_text("")

    def _configure_accounts(self, host: str, user: str, port: int) -> str:
        """The lines of slurm.conf about accounts."""
        return "AccountingStorageType=accounting_storage/none"
