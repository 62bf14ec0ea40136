# SPDX-License-Identifier: Apache-2.0
"""The commands of a job: the workers' step in each start mode, and what runs once, inside a container or not. Pure."""

from collections.abc import Sequence

from llmb.launch.cluster_config import ContainerSettings, StartMode
from llmb.launch.slurm.flags import Flags
from llmb.launch.slurm.placement import Placement
from llmb.launch.slurm.words import Shell, Word

FOLDER = Shell('"$llmb_folder"')
ADDRESS, PORT = Shell('"$llmb_address"'), Shell('"$llmb_port"')
# What torch.distributed.run would set, from what Slurm sets for every task.
TASK = (
    'export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"'
    ' LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"; exec "$@"'
)


def worker_step(
    start: StartMode,
    placement: Placement,
    worker: Sequence[Word],
    container: ContainerSettings,
    mounts: Sequence[str],
    *,
    gpu: bool,
    srun_flags: Flags,
) -> tuple[Word, ...]:
    """One srun over all nodes. A task that fails ends the others.

    ``worker`` is what follows the interpreter's name, for example ``-m llmb.engine.worker FOLDER``.
    """
    tasks_per_node = 1 if start == "torchrun" else placement.processes_per_node
    srun = (
        "srun",
        f"--nodes={placement.nodes}",
        f"--ntasks={placement.nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        *(f"--{name}" if value is None else f"--{name}={value}" for name, value in srun_flags.items()),
    )
    if start == "torchrun":
        words = (*interpreter(container), *torchrun(placement), *worker)
    else:
        words = ("sh", "-c", TASK, "llmb-task", *interpreter(container), *worker)
    return (*srun, *inside(container, mounts, gpu=gpu), *words)


def torchrun(placement: Placement) -> tuple[Word, ...]:
    """Options of the interpreter that start a node's workers; nodes meet at the first one's address."""
    return (
        "-m",
        "torch.distributed.run",
        f"--nnodes={placement.nodes}",
        f"--nproc-per-node={placement.processes_per_node}",
        "--rdzv-backend=c10d",
        Shell('--rdzv-endpoint="$llmb_address:$llmb_port"'),
        Shell('--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'),
        "--max-restarts=0",
    )


def single_step(container: ContainerSettings, mounts: Sequence[str], arguments: Sequence[Word]) -> tuple[Word, ...]:
    """Runs the interpreter once, on the node of the batch script."""
    words = (*inside(container, mounts, gpu=False), *interpreter(container), *arguments)
    if container.runtime == "pyxis":
        return ("srun", "--nodes=1", "--ntasks=1", "--overlap", Shell('--nodelist="$SLURMD_NODENAME"'), *words)
    return words


def interpreter(container: ContainerSettings) -> tuple[Word, ...]:
    return (Shell('"$llmb_python"') if container.runtime == "none" else container.python,)


def inside(container: ContainerSettings, mounts: Sequence[str], *, gpu: bool) -> tuple[Word, ...]:
    """Options of srun with Pyxis, or the command that Apptainer runs; nothing without a container."""
    image = container.image or ""
    if container.runtime == "pyxis":
        flags = (f"--container-image={image}", f"--container-mounts={','.join(map(both_sides, mounts))}")
        return (*flags, "--no-container-mount-home", "--container-writable")
    if container.runtime == "apptainer":
        binds = [word for mount in mounts for word in ("--bind", mount)]
        return ("apptainer", "exec", *(["--nv"] if gpu else []), *binds, image)
    return ()


def both_sides(mount: str) -> str:
    """A mount as Pyxis wants it, with the path inside."""
    return mount if ":" in mount else f"{mount}:{mount}"
