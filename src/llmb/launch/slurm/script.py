# SPDX-License-Identifier: Apache-2.0
"""Generates the batch script of a job, with the workers' step in each start mode.

All text except llmb's own is quoted. Pure.
"""

import inspect
import shlex
from collections.abc import Iterable, Iterator, Sequence

from llmb.base.errors import UsageError
from llmb.launch import bind, ranks
from llmb.launch.jobspec.job_options import ContainerSettings, Flags
from llmb.launch.jobspec.spec import JobSpec, Word
from llmb.launch.slurm.settings import directive
from llmb.runs.folder import VBOOST_FILE, RunFolder

WIDTH = 110


class Shell(str):
    """Text that the shell expands, made only from constants and quoted words."""

    __slots__ = ()


ShellWord = str | Shell


def command_line(words: Iterable[ShellWord]) -> str:
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


def command_lines(words: Iterable[ShellWord]) -> str:
    """Format a command with line breaks for readability."""
    lines: list[str] = []
    for part in (word if isinstance(word, Shell) else shlex.quote(word) for word in words):
        if lines and len(lines[-1]) + len(part) < WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return " \\\n    ".join(lines)


def shell_word(word: Word, interpreter: ShellWord) -> ShellWord:
    """Convert a word of a command; a placeholder becomes a shell variable or the interpreter."""
    if isinstance(word, str):
        return word
    if word.slot == "python":
        return interpreter if not word.after else Shell(command_line([interpreter]) + shlex.quote(word.after))
    return Shell(word.before + '"$llmb_folder"' + word.after)


BESIDE = ("--overlap", "--mem=0")
"""Options of a step that shares the job's cores and memory with concurrent steps."""
BIND_FILE = Shell('"$llmb_folder"/bind.py')
PYTHON_WORD, FOLDER_WORD = Shell('"$llmb_python"'), Shell('"$llmb_folder"')
# srun ends the step when the first node fails, and may lose output on its way to the log, so that node waits.
PROLOG = r"""for llmb_command; do
    bash -c "$llmb_command" </dev/null || {
        llmb_code=$?
        echo "llmb: node $SLURMD_NODENAME failed: the prolog ended with exit code $llmb_code: $llmb_command" >&2
        sleep 3
        exit "$llmb_code"
    }
done"""
BOOST = r"""smi() {
    timeout 60 sudo -n nvidia-smi boost-slider --vboost "$1" 2>/dev/null ||
        timeout 60 nvidia-smi boost-slider --vboost "$1"
} >&2
word=unset
end() {
    [ "$word" = unset ] || smi 0
}
trap "end; exit" TERM
if smi "$1"; then
    word=set
elif [ "$2" = required ]; then
    echo "llmb: node $SLURMD_NODENAME failed: vboost $1 could not be set; it may need sudo" >&2
else
    echo "llmb: node $SLURMD_NODENAME trains without vboost $1, which could not be set" >&2
fi
echo "$word"
read -r
end"""
BOOST_SET = r"""} &&
{
    llmb_boost_out=${llmb_boost[0]} llmb_boost_in=${llmb_boost[1]} llmb_boost_step=$llmb_boost_PID llmb_boosted=0
    llmb_told=0
    while [ "$llmb_told" -lt "$SLURM_JOB_NUM_NODES" ] && read -r -u "$llmb_boost_out" llmb_word; do
        llmb_told=$((llmb_told + 1))
        [ "$llmb_word" != set ] || llmb_boosted=$((llmb_boosted + 1))
    done
    printf '{"level": %d, "nodes_set": %d, "nodes": %d}\n' LEVEL "$llmb_boosted" "$SLURM_JOB_NUM_NODES" \
        >"$llmb_folder"/VBOOST
    ENOUGH
} &&"""
"""Shell code that waits for every node's answer and writes the result."""
ALL_SET = '[ "$llmb_boosted" -eq "$SLURM_JOB_NUM_NODES" ]'
ALL_REPORTED = '[ "$llmb_told" -eq "$SLURM_JOB_NUM_NODES" ]'
BOOST_ENDS = r"""if [ -n "${llmb_boost_in:-}" ]; then
    exec {llmb_boost_in}>&-
    wait "$llmb_boost_step"
fi"""
SAMPLER = (
    'exec "$1" -P -m llmb.readers.samples.sampler "$2/resources/$SLURMD_NODENAME.jsonl" "$SLURMD_NODENAME" 5 cuda 0'
)
"""Samples a node without a worker, because those of other programs belong to another step."""
SAMPLER_ENDS = r"""if [ -n "${llmb_sampler:-}" ]; then
    exec {llmb_sampled}>&-
    for ((llmb_try = 0; llmb_try < 20; llmb_try++)); do
        kill -0 "$llmb_sampler" 2>/dev/null || break
        sleep 0.5
    done
    kill "$llmb_sampler" 2>/dev/null  # a hung driver must not delay the job
fi"""


def write_node_files(spec: JobSpec) -> Iterator[str]:
    """Yield shell code that writes the program ``bind`` into the run folder for a container that may lack llmb."""
    if spec.bind_arguments and not spec.control_in_container:
        yield f"cat >{BIND_FILE} <<'llmb_bind_ends'"
        yield inspect.getsource(bind).rstrip("\n")
        yield "llmb_bind_ends"


def with_setup(spec: JobSpec, workers: str) -> Iterator[str]:
    """Yield shell code that runs ``workers`` once every node is ready."""
    if not (spec.prolog or spec.vboost or spec.sampled):
        yield workers
        return
    yield "{"
    yield "trap : TERM  # Slurm ends the steps; this waits for their end"
    if spec.prolog:
        step = (*_on_every_node(spec), "--kill-on-bad-exit=1", "bash", "-c", PROLOG, "llmb-prolog", *spec.prolog)
        yield f"{command_lines(step)} &&"
    if spec.vboost:
        yield "# The boost ends with the pipe to it, or when Slurm ends the job."
        level, how = str(spec.vboost.level), "required" if spec.vboost.required else "tried"
        step = (*_on_every_node(spec), *BESIDE, "bash", "-c", BOOST, "llmb-vboost", level, how)
        yield "coproc llmb_boost {"
        yield f"exec {command_lines(step)}"
        enough = ALL_SET if spec.vboost.required else ALL_REPORTED
        yield BOOST_SET.replace("LEVEL", level).replace("VBOOST", VBOOST_FILE).replace("ENOUGH", enough)
    if spec.sampled:
        yield "# The samplers end when the pipe to them is closed. If one does not start, the run continues without it."
        step = (*_on_every_node(spec), *BESIDE, "bash", "-c", SAMPLER, "llmb-sampler", PYTHON_WORD, FOLDER_WORD)
        yield f"exec {{llmb_sampled}}> >(exec {command_lines(step)} >/dev/null 2>&1) && llmb_sampler=$! &&"
    yield workers
    if spec.sampled or spec.vboost:
        yield "llmb_exit_code=$?"
        yield from (text for text, used in ((SAMPLER_ENDS, spec.sampled), (BOOST_ENDS, spec.vboost)) if used)
        yield "exit $llmb_exit_code"
    yield "}"


def bound_words(spec: JobSpec, python: ShellWord, words: Sequence[ShellWord]) -> list[ShellWord]:
    """Return a worker's command, preceded by the program that binds it to cores and memory, if requested."""
    if not spec.bind_arguments:
        return list(words)
    # Both exclude the working folder from the path; an older Python in a framework's container lacks -P.
    module: Sequence[ShellWord] = ("-P", "-m", bind.__name__) if spec.control_in_container else ("-I", BIND_FILE)
    return [python, *module, *spec.bind_arguments, *words]


def _on_every_node(spec: JobSpec) -> tuple[str, ...]:
    nodes = spec.placement.nodes
    return ("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none")


# As llmb.launch.ranks does for its ranks, sets the limit of open files, the variables of torch.distributed from those
# of Slurm, and the number of the compiler's processes.
TASK = (
    f'ulimit -S -n {ranks.MOST_FILES} 2>/dev/null || ulimit -S -n "$(ulimit -H -n)";'
    ' export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"'
    ' LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"'
    ' TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE))}"'
    '; exec "$@"'
)


ROUNDS = r"""llmb_nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
llmb_unfit=()

# Run a step on some nodes, by index, in a folder of its own, and write its exit code there. Time limits end its
# processes, and srun if a node does not answer.
llmb_step() {
    local seconds=$1 module=$2 name=$3 places=${4//,/ } place nodes= known count=0
    for place in $places; do
        [ -z "${llmb_unfit[place]:-}" ] || return 0
        nodes+=",${llmb_nodes[place]}" count=$((count + 1))
    done
    [ "$count" -gt 0 ] || return 0
    nodes=${nodes#,} llmb_at="$llmb_folder/rounds/$name"
    mkdir -p "$llmb_at" && cp "$llmb_folder"/*_job.json "$llmb_at" || return 0
    known=$(scontrol -o show node "${nodes%%,*}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    export MASTER_ADDR="${known:-${nodes%%,*}}" MASTER_PORT=$(shuf -i 20000-32767 -n 1)
    export LLMB_STORE_ID="$LLMB_STORE_ID-$name"
    STEP >"$llmb_at/log" 2>&1
    echo "$?" >"$llmb_at/code"
}

# Run the steps of each line concurrently. A node that fails alone is excluded from later steps.
llmb_rounds() {
    local seconds module steps one places pids
    while read -r seconds module steps; do
        pids=()
        for one in $steps; do
            places=${one#*:}
            [ -n "$places" ] || places=$(ASK </dev/null)
            llmb_step "$seconds" "$module" "${one%%:*}" "$places" </dev/null &
            pids+=("$!")
        done
        wait "${pids[@]}"
        for one in $steps; do
            case ${one#*:} in
            *,* | "") ;;
            *) [ "$(cat "$llmb_folder/rounds/${one%%:*}/code" 2>/dev/null)" = 0 ] || llmb_unfit[${one#*:}]=1 ;;
            esac
        done
    done <"$llmb_folder/rounds.txt"
}
"""
END = r"""set -uo pipefail
llmb_exit_code=1
llmb_signal=
llmb_workers=
llmb_woken=

# Record how the job ended, because Slurm forgets jobs, and not every cluster has accounting.
llmb_leave() {
    local code=$? file="$llmb_folder/job_end.json"
    trap - EXIT
    printf '{"job_id": "%s", "restarts": %d, "exit_code": %d, "signal": "%s", "ended_at": "%s"}\n' \
        "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$code" "$llmb_signal" "$(date -u +%Y-%m-%dT%H:%M:%S+00:00)" \
        >"$file.$$" && mv -f "$file.$$" "$file"
    exit "$code"
}

# Slurm sends TERM to every process of the job, but the signal of --signal only to this script.
llmb_end() {
    llmb_signal=$1
    llmb_woken=1
    if [ "$1" != TERM ] && [ -n "$llmb_workers" ]; then
        scancel --signal=TERM "$SLURM_JOB_ID"
    fi
}"""
TRAPS = """trap llmb_leave EXIT
trap 'llmb_end TERM' TERM
trap 'llmb_end USR1' USR1"""
FIRST_NODE = r"""
# The address by which Slurm reaches the first node, because other nodes may not resolve its name.
llmb_address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
llmb_known=$(scontrol -o show node "$llmb_address" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
MASTER_ADDR="${llmb_known:-$llmb_address}"
export MASTER_ADDR"""
ONE_NODE = r"""
# Listen only within this node.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=lo}"
export MASTER_ADDR=127.0.0.1"""
PORT = r"""# An unused port outside of the kernel's ephemeral range, and a unique id for the ranks' store.
while MASTER_PORT=$(shuf -i 20000-32767 -n 1); do
    grep -qs ":$(printf %04X "$MASTER_PORT") " /proc/net/tcp /proc/net/tcp6 || break
done
export MASTER_PORT
LLMB_STORE_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export LLMB_STORE_ID"""
WAIT = r"""llmb_workers=$!
while :; do
    llmb_woken=
    wait "$llmb_workers"
    llmb_exit_code=$?
    # A signal ends 'wait' before the workers have ended.
    [ -n "$llmb_woken" ] || break
done
# At the time limit, Slurm sends TERM to the workers first, and shortly afterwards to this script.
if [ "$llmb_exit_code" != 0 ] && [ -z "$llmb_signal" ]; then
    sleep 3 &
    wait "$!"
fi"""


def worker_step(spec: JobSpec) -> tuple[ShellWord, ...]:
    """Return the srun command that runs the workers on all nodes, and ends all tasks if a task fails."""
    placement = spec.placement
    tasks_per_node = tasks_of(spec)
    srun = (
        "srun",
        f"--nodes={placement.nodes}",
        f"--ntasks={placement.nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        *_cores(spec),
        *_step_flags(spec),
    )
    python = interpreter(spec.container)
    work = [shell_word(word, python) for word in spec.work]
    if spec.start == "once":
        words = work
    elif spec.start == "torchrun":
        words = [python, *ranks.words(placement.nodes, placement.processes_per_node), *bound_words(spec, python, work)]
    else:
        words = ["sh", "-c", TASK, "llmb-task", *bound_words(spec, python, work)]
    return (*srun, *inside(spec.container, gpu=spec.gpus), *words)


def rounds_functions(spec: JobSpec) -> str:
    """Return shell code with the function ``llmb_rounds``, which runs the steps that ``rounds.txt`` lists."""
    python = interpreter(spec.container)
    srun = [
        *("timeout", "--kill-after=5", Shell("$((seconds + 15))"), "srun", Shell('--nodelist="$nodes"')),
        *(Shell(f'--{name}="$count"') for name in ("nodes", "ntasks")),
        *("--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpu-bind=none", *BESIDE, *_step_flags(spec)),
        *inside(spec.container, gpu=spec.gpus),
        *("timeout", "--signal=KILL", Shell('"$seconds"')),
    ]
    launcher = ranks.words(Shell('"$count"'), spec.placement.processes_per_node)
    work = bound_words(spec, python, [python, "-P", "-m", Shell('"$module"'), Shell('"$llmb_at"')])
    step = command_line([*srun, python, *launcher, *work])
    return ROUNDS.replace("STEP", step).replace("ASK", command_line(single_step(spec, spec.work)))


def _step_flags(spec: JobSpec) -> tuple[str, ...]:
    return tuple(f"--{name}" if value is None else f"--{name}={value}" for name, value in spec.step_flags.items())


def _cores(spec: JobSpec) -> tuple[str, ...]:
    """Return srun's flag for the cores of a task that is started once; srun does not take it from the job's flags."""
    cores = spec.flags.get("cpus-per-task") if spec.start == "once" else None
    return (f"--cpus-per-task={cores}",) if cores else ()


def tasks_of(spec: JobSpec) -> int:
    """Return the number of tasks that Slurm starts per node."""
    return spec.placement.processes_per_node if spec.start == "task-per-gpu" else 1


def single_step(spec: JobSpec, words: Sequence[Word]) -> tuple[ShellWord, ...]:
    """Return a command that runs once, on the node of the batch script, in the container if it has llmb."""
    container = spec.container if spec.control_in_container else ContainerSettings()
    python = interpreter(container)
    command = (*inside(container, gpu=False), *(shell_word(word, python) for word in words))
    if container.runtime == "pyxis":
        return ("srun", "--nodes=1", "--ntasks=1", *BESIDE, Shell('--nodelist="$SLURMD_NODENAME"'), *command)
    return command


def interpreter(container: ContainerSettings) -> ShellWord:
    return Shell('"$llmb_python"') if container.runtime == "none" else container.python


def inside(container: ContainerSettings, *, gpu: bool) -> tuple[ShellWord, ...]:
    """Return srun's options for Pyxis, or the command prefix for Apptainer; an empty tuple for neither."""
    image = container.image or ""
    if container.runtime == "pyxis":
        flags = (f"--container-image={image}", f"--container-mounts={','.join(map(both_sides, container.mounts))}")
        return (*flags, "--no-container-mount-home", "--container-writable")
    if container.runtime == "apptainer":
        binds = [word for mount in container.mounts for word in ("--bind", mount)]
        return ("apptainer", "exec", *(["--nv"] if gpu else []), *binds, image)
    return ()


def both_sides(mount: str) -> str:
    """Return a mount in the format of Pyxis, which requires the path inside the container."""
    return mount if ":" in mount else f"{mount}:{mount}"


def batch_script(spec: JobSpec, folder: RunFolder) -> str:
    """Return the batch script; raise UsageError if Slurm cannot write into ``folder``."""
    flags = {**spec.flags, **file_flags(folder)}
    head = ["#!/bin/bash", f"# {spec.title}", *(directive(name, value) for name, value in flags.items())]
    parts = [*head, "", *_environment(spec), "", END, "", *_meeting_point(spec, folder), "", *_work(spec)]
    return "\n".join(parts) + "\n"


def file_flags(folder: RunFolder) -> Flags:
    """Return the flags for the working folder and the output; raise UsageError if Slurm cannot write there."""
    base = folder.path.parent
    if "\\" in str(base) or not str(base).isprintable():
        do = "set LLMB_INSTALL to a folder without backslashes and control characters in its path"
        raise UsageError("Slurm cannot write into this folder", where=repr(str(base)), do=do)
    escaped = str(base).replace("%", "%%")
    return {
        "output": f"{escaped}/{folder.name.replace('%', '%%')}/{folder.batch_output.name}",
        "open-mode": "append",
        "chdir": str(folder.path),
    }


def _environment(spec: JobSpec) -> Iterator[str]:
    yield "unset SLURM_JWT  # the submitter's token, which the job does not need"
    yield from (f"module load {shlex.quote(module)}" for module in spec.modules)
    yield from (f". {shlex.quote(profile)}" for profile in spec.profiles)
    yield from (f"export {item.name}={shlex.quote(item.value)}  # {item.origin}" for item in spec.variables)
    yield f"llmb_threads=$((${{SLURM_CPUS_ON_NODE:-1}} / {spec.placement.processes_per_node}))"
    yield 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((llmb_threads > 1 ? llmb_threads : 1))}"'


def _meeting_point(spec: JobSpec, folder: RunFolder) -> Iterator[str]:
    yield f"llmb_folder={shlex.quote(str(folder.path))}"
    yield f"llmb_python={shlex.quote(spec.python)}"
    yield TRAPS
    if spec.start == "once":
        return
    if spec.placement.nodes > 1:
        yield FIRST_NODE
    elif spec.start == "task-per-gpu":
        yield ONE_NODE
    if spec.placement.nodes > 1 or spec.start == "task-per-gpu":
        yield PORT


def _work(spec: JobSpec) -> Iterator[str]:
    if spec.begin:
        yield f"{command_line(single_step(spec, spec.begin))} || exit $?"
    yield '[ -z "$llmb_signal" ] || exit 143'
    yield ""
    log = f'"$llmb_folder"/{shlex.quote(spec.log)}'
    yield from write_node_files(spec)
    workers = "llmb_rounds" if spec.start == "rounds" else command_lines(worker_step(spec))
    if spec.start == "rounds":
        yield rounds_functions(spec)
    work = "\n".join(with_setup(spec, workers))
    yield f"{work} \\\n    >>{log} 2>&1 </dev/null &"
    yield WAIT
    if spec.finish:
        yield ""
        finish = [*single_step(spec, spec.finish), Shell('"$llmb_exit_code"'), Shell('"$llmb_signal"')]
        yield f'{command_line(finish)} || echo "llmb: the result could not be written here" >&2'
    yield 'exit "$llmb_exit_code"'
