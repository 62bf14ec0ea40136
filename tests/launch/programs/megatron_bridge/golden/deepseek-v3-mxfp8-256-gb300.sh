#!/bin/bash
# pretrain_deepseek-v3 671b mxfp8 on 256 x gb300, by llmb, with megatron_bridge v0.6.0
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --job-name=pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge
#SBATCH --time=00:30:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --segment=16
#SBATCH --no-requeue
#SBATCH --account=research
#SBATCH --partition=batch
#SBATCH --output=/lustre/bench/workloads/pretrain_deepseek-v3/experiments/pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge/pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge_1700000000/pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge/sbatch_pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge.out
#SBATCH --open-mode=append
#SBATCH --chdir=/lustre/bench/workloads/pretrain_deepseek-v3/experiments/pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge/pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge_1700000000/pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge

unset SLURM_JWT  # the submitter's token, which the job does not need
export TOKENIZERS_PARALLELISM=False  # megatron_bridge
export TRANSFORMERS_OFFLINE=1  # megatron_bridge
llmb_threads=$((${SLURM_CPUS_ON_NODE:-1} / 4))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((llmb_threads > 1 ? llmb_threads : 1))}"

set -uo pipefail
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
}

llmb_folder=/lustre/bench/workloads/pretrain_deepseek-v3/experiments/pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge/pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge_1700000000/pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge
llmb_python=/lustre/bench/venv/bin/python
trap llmb_leave EXIT
trap 'llmb_end TERM' TERM
trap 'llmb_end USR1' USR1

# The address by which Slurm reaches the first node, because other nodes may not resolve its name.
llmb_address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
llmb_known=$(scontrol -o show node "$llmb_address" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
MASTER_ADDR="${llmb_known:-$llmb_address}"
export MASTER_ADDR
# An unused port outside of the kernel's ephemeral range, and a unique id for the ranks' store.
while MASTER_PORT=$(shuf -i 20000-32767 -n 1); do
    grep -qs ":$(printf %04X "$MASTER_PORT") " /proc/net/tcp /proc/net/tcp6 || break
done
export MASTER_PORT
LLMB_STORE_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export LLMB_STORE_ID

"$llmb_python" -P -m llmb.jobs.begin "$llmb_folder" || exit $?
[ -z "$llmb_signal" ] || exit 143

cat >"$llmb_folder"/bind.py <<'llmb_bind_ends'
# SPDX-License-Identifier: Apache-2.0
"""Binds a worker to CPU cores and to the memory of a NUMA node, then becomes the worker.

Its arguments are the settings ``binding.cpu`` and ``binding.numa`` and the worker's command. With ``auto``, it binds as
with ``local`` unless there is a ``reason_not_to_bind``, but memory of other nodes remains usable. It imports nothing
from llmb, because the batch script contains its source text if the container does not have llmb.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call ``set_mempolicy``, by architecture."""
MPOL_PREFERRED, MPOL_BIND = 1, 2
MOST_NODES = 1024
SWITCH = "LLMB_NUMA_BINDING"
"""The environment variable that disables ``auto`` if its value is ``none``."""
REPORT = "LLMB_BINDING"
"""The environment variable that tells a worker how it is bound."""


def parse_cpus(text: str) -> list[int]:
    """Parse a list of CPUs in the kernel's format, such as ``0-3,8``."""
    spans = (span.partition("-") for span in text.strip().split(",") if span)
    return [cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)]


def cpu_text(cpus: Iterable[int]) -> str:
    """Format CPUs as a list in the kernel's format."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def numa_nodes(root: Path, allowed: Collection[int]) -> dict[int, set[int]]:
    """Return the allowed CPUs of each NUMA node that has any; if no node has any, node 0 has all of them."""
    nodes = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = set(parse_cpus((path / "cpulist").read_text())) & set(allowed)
        if cpus:
            nodes[int(path.name[4:])] = cpus
    return dict(sorted(nodes.items())) or {0: set(allowed)}


def cores(root: Path, cpus: Collection[int], nodes: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Return, for each core, its hardware threads in ``cpus``. Cores are ordered by NUMA node, then by number."""
    groups = set()
    for cpu in cpus:
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings = parse_cpus(path.read_text()) if path.exists() else [cpu]
        groups.add(tuple(sorted(set(siblings) & set(cpus))))
    place = {cpu: node for node, members in nodes.items() for cpu in members}
    return [list(core) for core in sorted(groups, key=lambda core: (place.get(core[0], 0), core[0]))]


def gpu_nodes(root: Path, environ: Mapping[str, str], workers: int) -> list[int] | None:
    """Return the NUMA node of each worker's GPU; None unless the driver and the system report all of them."""
    gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    chosen = [_gpu(gpus, name) for name in visible] if visible else list(gpus)
    numbers = []
    for gpu in chosen[:workers]:
        path = root / "sys/bus/pci/devices" / (gpu.name.lower() if gpu else "") / "numa_node"
        node = int(path.read_text()) if gpu and path.exists() else -1
        if node < 0:
            return None
        numbers.append(node)
    return numbers if len(numbers) == workers else None


def _gpu(gpus: Sequence[Path], name: str) -> Path | None:
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    return next((gpu for gpu in gpus if name in (gpu / "information").read_text()), None)


def reason_not_to_bind(root: Path, environ: Mapping[str, str], allowed: Collection[int]) -> str | None:
    """Return why ``auto`` does not bind the workers; None if it does."""
    workers = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if environ.get(SWITCH, "").lower() == "none":
        return f"{SWITCH} is none"
    if workers == 1:
        return "LOCAL_WORLD_SIZE is unset or 1"
    if "SLURM_JOB_ID" in environ and workers < len(list((root / "proc/driver/nvidia/gpus").glob("*"))):
        return "the job has only some of the node's GPUs, which Slurm numbers from 0"
    places = gpu_nodes(root, environ, workers)
    if places is None:
        return "the system does not report the NUMA nodes of all GPUs"
    if not set(places) <= set(numa_nodes(root, allowed)):
        return "the workers are not allowed to use the cores of every GPU's NUMA node"
    return None


def share(
    root: Path, environ: Mapping[str, str], allowed: Collection[int], cpu: str, numa: str
) -> tuple[list[int], int | None]:
    """Return this worker's CPUs, and the NUMA node whose memory the worker should use, None for any node.

    Raises ValueError if there are too few cores.
    """
    rank, workers = int(environ["LOCAL_RANK"]), int(environ["LOCAL_WORLD_SIZE"])
    nodes = numa_nodes(root, allowed)
    mine, peers, node = set(allowed), list(range(workers)), None
    if numa == "local":
        places = gpu_nodes(root, environ, workers)
        if places is None or not set(places) <= set(nodes):
            places = [list(nodes)[number * len(nodes) // workers] for number in peers]
        node = places[rank]
        mine, peers = nodes[node], [number for number in peers if places[number] == node]
    if cpu == "none":
        return sorted(mine), node
    local = cores(root, mine, nodes)
    each = int(cpu) if cpu.isdecimal() else max(1, len(local) // len(peers))
    if each * len(peers) > len(local):
        where = "the node has" if node is None else f"NUMA node {node} has"
        raise ValueError(f"binding.cpu is {cpu}, so {len(peers)} x {each} cores are required, but {where} {len(local)}")
    first = peers.index(rank) * each
    return sorted(thread for core in local[first : first + each] for thread in core), node


def bind_memory(node: int, policy: int) -> str | None:
    """Set the memory policy of this process and the program that it becomes; return the problem, if any."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"unsupported on {platform.machine()}"
    mask = (ctypes.c_ulong * (MOST_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, policy, mask, ctypes.c_ulong(MOST_NODES + 1)):
        return os.strerror(ctypes.get_errno())
    return None


def main(cpu: str, numa: str, *command: str) -> None:
    """Bind this process to CPUs and memory, or log once per node why not, and become the worker's command."""
    where, rank = os.environ.get("SLURMD_NODENAME") or platform.node(), os.environ["LOCAL_RANK"]
    policy = MPOL_PREFERRED if numa == "auto" else MPOL_BIND
    if numa == "auto":
        reason = reason_not_to_bind(Path("/"), os.environ, os.sched_getaffinity(0))
        if reason:
            os.environ[REPORT] = f"none: {reason}"
            sys.stderr.write(f"llmb: local rank {rank} of {where} is not bound: {reason}\n" if rank == "0" else "")
            sys.stderr.flush()
            os.execvp(command[0], command)  # noqa: S606 (the batch script's command)
        numa = "local"
    try:
        cpus, node = share(Path("/"), os.environ, os.sched_getaffinity(0), cpu, numa)
    except ValueError as error:
        sys.exit(f"llmb: node {where} failed: {error}")
    os.sched_setaffinity(0, cpus)
    memory = ""
    if node is not None:
        failed = bind_memory(node, policy)
        memory = f", memory of NUMA node {node}{f' by first touch alone ({failed})' if failed else ''}"
    os.environ[REPORT] = f"CPUs {cpu_text(cpus)}{memory}"
    sys.stderr.write(f"llmb: local rank {rank} of {where}: {os.environ[REPORT]}\n")
    sys.stderr.flush()
    os.execvp(command[0], command)  # noqa: S606 (the batch script's command)


if __name__ == "__main__":
    main(*sys.argv[1:])
llmb_bind_ends
{
trap : TERM  # Slurm ends the steps; this waits for their end
# The samplers end when the pipe to them is closed. If one does not start, the run continues without it.
exec {llmb_sampled}> >(exec srun --nodes=64 --ntasks=64 --ntasks-per-node=1 --cpu-bind=none --overlap --mem=0 bash -c \
    'exec "$1" -P -m llmb.readers.samples.sampler "$2/resources/$SLURMD_NODENAME.jsonl" "$SLURMD_NODENAME" 5 cuda 0' \
    llmb-sampler "$llmb_python" "$llmb_folder" >/dev/null 2>&1) && llmb_sampler=$! &&
srun --nodes=64 --ntasks=256 --ntasks-per-node=4 --kill-on-bad-exit=1 --cpu-bind=none \
    '--container-image=nvcr.io#nvidia/nemo:26.08' \
    --container-mounts=/datasets:/datasets,/lustre/bench:/lustre/bench --no-container-mount-home \
    --container-writable sh -c \
    'ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"; export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE" TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE))}"; exec "$@"' \
    llmb-task python3 -I "$llmb_folder"/bind.py none auto bash -c \
    'found=; while read -r name _ value; do case $name in MAJOR|MINOR) found="${found:+$found.}$value";; esac; done </opt/Megatron-Bridge/src/megatron/bridge/package_info.py; case "$found" in 0.6) words=(); before=; for word; do own=$word; case "$before $word" in "python /opt/Megatron-Bridge/scripts/performance/run_script.py") word=/opt/Megatron-Bridge/scripts/performance/bootstrap.py;; "--task lora") word=peft;; esac; words+=("$word"); before=$own; done; set -- "${words[@]}";; *) echo "llmb: this image has megatron_bridge ${found:-of an unknown version}, and this job needs 0.6 for deepseek_v3" >&2; exit 2;; esac; exec numactl --cpunodebind=$((LOCAL_RANK/2)) --membind=$((LOCAL_RANK/2)) "$@"' \
    llmb-bind python /opt/Megatron-Bridge/scripts/performance/run_script.py --model_family_name deepseek \
    --model_recipe_name deepseek_v3 --task pretrain --gpu gb300 --compute_dtype fp8_mx --num_gpus 256 --max_steps \
    50 --global_batch_size 4096 --data mock --save_config_filepath "$llmb_folder"/ConfigContainer.yaml
llmb_exit_code=$?
if [ -n "${llmb_sampler:-}" ]; then
    exec {llmb_sampled}>&-
    for ((llmb_try = 0; llmb_try < 20; llmb_try++)); do
        kill -0 "$llmb_sampler" 2>/dev/null || break
        sleep 0.5
    done
    kill "$llmb_sampler" 2>/dev/null  # a hung driver must not delay the job
fi
exit $llmb_exit_code
} \
    >>"$llmb_folder"/log-pretrain_deepseek-v3_671b_mxfp8_gpus256_tp1_pp2_cp1_vp8_ep32_mbs1_gbs4096_gb300_megatron_bridge.out 2>&1 </dev/null &
llmb_workers=$!
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
fi

"$llmb_python" -P -m llmb.jobs.finish "$llmb_folder" "$llmb_exit_code" "$llmb_signal" || echo "llmb: the result could not be written here" >&2
exit "$llmb_exit_code"
