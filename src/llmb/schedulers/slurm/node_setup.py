# SPDX-License-Identifier: Apache-2.0
"""What a batch script does on every node for the workers: prolog, vboost, a sampler, and their binding. Pure."""

import inspect
from collections.abc import Iterator, Sequence

from llmb.jobspec.spec import JobSpec
from llmb.processes import bind
from llmb.runs.folder import VBOOST_FILE
from llmb.schedulers.slurm.shell import Shell, ShellWord, command_lines

BESIDE = ("--overlap", "--mem=0")
"""Options of a step that runs beside others, which may hold all cores and all memory of the job."""
BIND_FILE = Shell('"$llmb_folder"/bind.py')
PYTHON_WORD, FOLDER_WORD = Shell('"$llmb_python"'), Shell('"$llmb_folder"')
# srun ends the step with the first node that fails, and may lose what is still on its way to the log: that node waits.
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
"""Waits for the word of every node, and writes what came of it."""
ALL_SET = '[ "$llmb_boosted" -eq "$SLURM_JOB_NUM_NODES" ]'
ALL_TOLD = '[ "$llmb_told" -eq "$SLURM_JOB_NUM_NODES" ]'
BOOST_ENDS = r"""if [ -n "${llmb_boost_in:-}" ]; then
    exec {llmb_boost_in}>&-
    wait "$llmb_boost_step"
fi"""
SAMPLER = (
    r"""exec "$1" -P -m llmb.resources.sampler "$2/resources/$SLURMD_NODENAME.jsonl" "$SLURMD_NODENAME" 5 cuda $PPID"""
)
SAMPLER_ENDS = r"""if [ -n "${llmb_sampler:-}" ]; then
    exec {llmb_sampled}>&-
    for ((llmb_try = 0; llmb_try < 20; llmb_try++)); do
        kill -0 "$llmb_sampler" 2>/dev/null || break
        sleep 0.5
    done
    kill "$llmb_sampler" 2>/dev/null  # a node whose driver hangs holds up no job
fi"""


def files(spec: JobSpec) -> Iterator[str]:
    """What the workers need in the run folder."""
    if spec.binding.binds and not spec.control_in_container:
        yield f"cat >{BIND_FILE} <<'llmb_bind_ends'"
        yield inspect.getsource(bind).rstrip("\n")
        yield "llmb_bind_ends"


def with_setup(spec: JobSpec, workers: str) -> Iterator[str]:
    """The command of the workers, which start where every node is ready; whatever fails, its exit code counts."""
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
        enough = ALL_SET if spec.vboost.required else ALL_TOLD
        yield BOOST_SET.replace("LEVEL", level).replace("VBOOST", VBOOST_FILE).replace("ENOUGH", enough)
    if spec.sampled:
        yield "# The samplers end with the pipe to them. The run goes on without those that do not start."
        step = (*_on_every_node(spec), *BESIDE, "bash", "-c", SAMPLER, "llmb-sampler", PYTHON_WORD, FOLDER_WORD)
        yield f"exec {{llmb_sampled}}> >(exec {command_lines(step)} >/dev/null 2>&1) && llmb_sampler=$! &&"
    yield workers
    if spec.sampled or spec.vboost:
        yield "llmb_exit_code=$?"
        yield from (text for text, used in ((SAMPLER_ENDS, spec.sampled), (BOOST_ENDS, spec.vboost)) if used)
        yield "exit $llmb_exit_code"
    yield "}"


def bound(spec: JobSpec, python: ShellWord, words: Sequence[ShellWord]) -> list[ShellWord]:
    """The command of a worker, which binds itself first."""
    if not spec.binding.binds:
        return list(words)
    # Without the working folder on the path; an older Python of a framework's container lacks -P.
    module: Sequence[ShellWord] = ("-P", "-m", bind.__name__) if spec.control_in_container else ("-I", BIND_FILE)
    return [python, *module, str(spec.binding.cpu), spec.binding.numa, *words]


def _on_every_node(spec: JobSpec) -> tuple[str, ...]:
    nodes = spec.placement.nodes
    return (
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
    )
