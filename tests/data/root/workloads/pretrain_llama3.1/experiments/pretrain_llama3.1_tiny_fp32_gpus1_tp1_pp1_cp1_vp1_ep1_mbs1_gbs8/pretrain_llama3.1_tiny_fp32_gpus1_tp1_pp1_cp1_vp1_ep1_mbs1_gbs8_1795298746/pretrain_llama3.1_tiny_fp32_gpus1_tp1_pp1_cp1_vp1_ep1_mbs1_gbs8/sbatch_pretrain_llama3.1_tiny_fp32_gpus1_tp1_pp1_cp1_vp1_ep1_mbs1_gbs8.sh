#!/bin/bash
# pretrain_llama3.1 tiny fp32 on 1 x cpu, by llmb
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --job-name=pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8
#SBATCH --time=00:10:00
#SBATCH --cpus-per-task=1
#SBATCH --no-requeue
#SBATCH --partition=gpu
#SBATCH --array=0-2
#SBATCH --output=/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298746.%a/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/sbatch_pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8.out
#SBATCH --open-mode=append
#SBATCH --chdir=/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8

export PYTHONUNBUFFERED=1  # the shell that submitted
export GOMP_SPINCOUNT=10000  # engine
export GLOO_SOCKET_IFNAME=lo  # cluster_config.yaml
export OMP_NUM_THREADS=1  # cluster_config.yaml
llmb_threads=$((${SLURM_CPUS_ON_NODE:-1} / 1))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((llmb_threads > 1 ? llmb_threads : 1))}"

set -uo pipefail
llmb_exit_code=1
llmb_signal=
llmb_workers=
llmb_woken=

# Tells how the job ended, whatever ended it: Slurm forgets, and keeps no account everywhere.
llmb_leave() {
    local code=$? file="$llmb_folder/job_end.json"
    trap - EXIT
    printf '{"job_id": "%s", "restarts": %d, "exit_code": %d, "signal": "%s", "ended_at": "%s"}\n' \
        "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$code" "$llmb_signal" "$(date -u +%Y-%m-%dT%H:%M:%S+00:00)" \
        >"$file.$$" && mv -f "$file.$$" "$file"
    exit "$code"
}

# Slurm sends TERM to every process of the job, and what --signal asks for to this script alone.
llmb_end() {
    llmb_signal=$1
    llmb_woken=1
    if [ "$1" != TERM ] && [ -n "$llmb_workers" ]; then
        scancel --signal=TERM "$SLURM_JOB_ID"
    fi
}

llmb_folder=/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298746."$SLURM_ARRAY_TASK_ID"/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8
llmb_python=/cluster/venv/bin/python
trap llmb_leave EXIT
trap 'llmb_end TERM' TERM
trap 'llmb_end USR1' USR1

# The first node as Slurm reaches it: its name need not be known to the others.
llmb_address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
llmb_known=$(scontrol -o show node "$llmb_address" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
llmb_address="${llmb_known:-$llmb_address}"
llmb_port=$((20000 + SLURM_JOB_ID % 10000))

"$llmb_python" -m llmb.launch.slurm.begin "$llmb_folder" || exit $?
[ -z "$llmb_signal" ] || exit 143

srun --ntasks=1 --nodes=1 sh -c \
    'case "$SLURM_ARRAY_TASK_ID" in 1) exit 3;; esac; cat "$1" >> "$0/metrics.jsonl"; echo done' "$llmb_folder" \
    /cluster/tmp/ten_steps.jsonl \
    >>"$llmb_folder"/log-pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8.out 2>&1 </dev/null &
llmb_workers=$!
while :; do
    llmb_woken=
    wait "$llmb_workers"
    llmb_exit_code=$?
    # A signal ends 'wait' before the workers have ended.
    [ -n "$llmb_woken" ] || break
done

"$llmb_python" -m llmb.launch.slurm.finish "$llmb_folder" "$llmb_exit_code" "$llmb_signal" || echo "llmb: the result could not be written here" >&2
exit "$llmb_exit_code"
