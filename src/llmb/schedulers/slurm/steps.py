# SPDX-License-Identifier: Apache-2.0
"""The commands of a job: the workers' step in each start mode, and what runs once, inside a container or not. Pure."""

from collections.abc import Sequence

from llmb.jobspec.node_setup import ContainerSettings
from llmb.jobspec.spec import JobSpec, Word
from llmb.processes import ranks
from llmb.schedulers.slurm.node_setup import BESIDE, bound
from llmb.schedulers.slurm.shell import Shell, ShellWord, shell_word

# What llmb.processes.ranks does for its ranks: the limit of open files, the variables of torch.distributed, from what
# Slurm sets for every task, and the compiler's share of cores.
TASK = (
    f'ulimit -S -n {ranks.MOST_FILES} 2>/dev/null || ulimit -S -n "$(ulimit -H -n)";'
    ' export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"'
    ' LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"'
    ' TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE))}"'
    '; exec "$@"'
)


AGENT = 'trap "exit 143" TERM; "$@" || sleep 86400'
"""An agent that fails ends no other: only one that has ended well, when all is done, ends the rest."""
AGENTS_WAIT_S = 15
"""How long others may then go on."""


def worker_step(spec: JobSpec) -> tuple[ShellWord, ...]:
    """One srun over all nodes. A task that fails ends the others, unless they are agents."""
    placement = spec.placement
    tasks_per_node = tasks_of(spec)
    srun = (
        "srun",
        f"--nodes={placement.nodes}",
        f"--ntasks={placement.nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        "--kill-on-bad-exit=1",
        # Agents may run beside a shell that is a step itself.
        *(("--no-kill", f"--wait={AGENTS_WAIT_S}", *BESIDE) if spec.start == "agents" else ()),
        "--cpu-bind=none",
        *_cores(spec),
        *(f"--{name}" if value is None else f"--{name}={value}" for name, value in spec.step_flags.items()),
    )
    python = interpreter(spec.container)
    work = [shell_word(word, python) for word in spec.work]
    if spec.start == "once":
        words = work
    elif spec.start == "agents":
        words = ["sh", "-c", AGENT, "llmb-agent", *work]
    elif spec.start == "torchrun":
        words = [python, *ranks.words(placement.nodes, placement.processes_per_node), *bound(spec, python, work)]
    else:
        words = ["sh", "-c", TASK, "llmb-task", *bound(spec, python, work)]
    return (*srun, *inside(spec.container, gpu=spec.gpus), *words)


def _cores(spec: JobSpec) -> tuple[str, ...]:
    """srun does not take the number of a job that asks for cores by itself."""
    cores = spec.flags.get("cpus-per-task") if spec.start == "once" else None
    return (f"--cpus-per-task={cores}",) if cores else ()


def tasks_of(spec: JobSpec) -> int:
    """Tasks that Slurm starts on a node."""
    return spec.placement.processes_per_node if spec.start == "task-per-gpu" else 1


def single_step(spec: JobSpec, words: Sequence[Word]) -> tuple[ShellWord, ...]:
    """Runs a command once, on the node of the batch script."""
    container = spec.container if spec.control_in_container else ContainerSettings()
    python = interpreter(container)
    command = (*inside(container, gpu=False), *(shell_word(word, python) for word in words))
    if container.runtime == "pyxis":
        return ("srun", "--nodes=1", "--ntasks=1", *BESIDE, Shell('--nodelist="$SLURMD_NODENAME"'), *command)
    return command


def interpreter(container: ContainerSettings) -> ShellWord:
    return Shell('"$llmb_python"') if container.runtime == "none" else container.python


def inside(container: ContainerSettings, *, gpu: bool) -> tuple[ShellWord, ...]:
    """Options of srun with Pyxis, or the command that Apptainer runs; nothing without a container."""
    image = container.image or ""
    if container.runtime == "pyxis":
        flags = (f"--container-image={image}", f"--container-mounts={','.join(map(both_sides, container.mounts))}")
        return (*flags, "--no-container-mount-home", "--container-writable")
    if container.runtime == "apptainer":
        binds = [word for mount in container.mounts for word in ("--bind", mount)]
        return ("apptainer", "exec", *(["--nv"] if gpu else []), *binds, image)
    return ()


def both_sides(mount: str) -> str:
    """A mount as Pyxis wants it, with the path inside."""
    return mount if ":" in mount else f"{mount}:{mount}"
