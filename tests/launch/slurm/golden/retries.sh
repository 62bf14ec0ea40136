#!/bin/bash
# pretrain_llama3.1 405b bf16 on 576 x h100, by llmb
#SBATCH --nodes=72
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --job-name=pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100
#SBATCH --time=2:00:00
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --account=research
#SBATCH --partition=batch
#SBATCH --mail-type=FAIL
#SBATCH --signal=B:USR1@120
#SBATCH --dependency=afterok:41
#SBATCH --output=/lustre/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100/pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100_1700000000/pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100/sbatch_pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100.out
#SBATCH --open-mode=append
#SBATCH --chdir=/lustre/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100/pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100_1700000000/pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100

unset SLURM_JWT  # the submitter's token, which the job does not need
export PYTHONUNBUFFERED=1  # engine
export PYTORCH_ALLOC_CONF=expandable_segments:True  # engine
export TORCH_NCCL_HIGH_PRIORITY=1  # engine
export CUDA_DEVICE_MAX_CONNECTIONS=32  # engine
export NCCL_NVLS_ENABLE=1  # the shell that submitted
export NCCL_P2P_NET_CHUNKSIZE=262144  # recipe
export NCCL_DEBUG=INFO  # --env
llmb_threads=$((${SLURM_CPUS_ON_NODE:-1} / 8))
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

llmb_folder=/lustre/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100/pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100_1700000000/pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100
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

srun --nodes=72 --ntasks=72 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "$llmb_python" -P -m \
    llmb.launch.ranks 72 8 "$llmb_python" -P -m llmb.launch.bind none auto "$llmb_python" -P -m llmb.engine.worker \
    "$llmb_folder" \
    >>"$llmb_folder"/log-pretrain_llama3.1_405b_bf16_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100.out 2>&1 </dev/null &
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
