#!/bin/bash
# finetune_llama3 70b bf16 on 32 x gb200, by llmb
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --job-name=lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic
#SBATCH --time=00:15:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --segment=8
#SBATCH --no-requeue
#SBATCH --account=research
#SBATCH --partition=batch
#SBATCH --output=/lustre/bench/workloads/finetune_llama3/experiments/lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic/lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic_1700000000/lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic/sbatch_lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic.out
#SBATCH --open-mode=append
#SBATCH --chdir=/lustre/bench/workloads/finetune_llama3/experiments/lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic/lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic_1700000000/lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic

unset SLURM_JWT  # the submitter's token, which the job does not need
export PYTHONUNBUFFERED=1  # engine
export PYTORCH_ALLOC_CONF=expandable_segments:True  # engine
export TORCH_NCCL_HIGH_PRIORITY=1  # engine
export CUDA_DEVICE_MAX_CONNECTIONS=32  # engine
export NCCL_NVLS_ENABLE=0  # recipe
export NCCL_P2P_NET_CHUNKSIZE=2097152  # recipe
export NCCL_NET_GDR_LEVEL=PHB  # recipe
export NCCL_NET_GDR_C2C=1  # recipe
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

llmb_folder=/lustre/bench/workloads/finetune_llama3/experiments/lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic/lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic_1700000000/lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic
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

{
trap : TERM  # Slurm ends the steps; this waits for their end
srun --nodes=8 --ntasks=8 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 bash -c \
    'for llmb_command; do
    bash -c "$llmb_command" </dev/null || {
        llmb_code=$?
        echo "llmb: node $SLURMD_NODENAME failed: the prolog ended with exit code $llmb_code: $llmb_command" >&2
        sleep 3
        exit "$llmb_code"
    }
done' \
    llmb-prolog 'test -w /scratch' 'echo it'"'"'s "$SLURMD_NODENAME"' &&
# The boost ends with the pipe to it, or when Slurm ends the job.
coproc llmb_boost {
exec srun --nodes=8 --ntasks=8 --ntasks-per-node=1 --cpu-bind=none --overlap --mem=0 bash -c \
    'smi() {
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
end' \
    llmb-vboost 1 required
} &&
{
    llmb_boost_out=${llmb_boost[0]} llmb_boost_in=${llmb_boost[1]} llmb_boost_step=$llmb_boost_PID llmb_boosted=0
    llmb_told=0
    while [ "$llmb_told" -lt "$SLURM_JOB_NUM_NODES" ] && read -r -u "$llmb_boost_out" llmb_word; do
        llmb_told=$((llmb_told + 1))
        [ "$llmb_word" != set ] || llmb_boosted=$((llmb_boosted + 1))
    done
    printf '{"level": %d, "nodes_set": %d, "nodes": %d}\n' 1 "$llmb_boosted" "$SLURM_JOB_NUM_NODES" \
        >"$llmb_folder"/vboost.json
    [ "$llmb_boosted" -eq "$SLURM_JOB_NUM_NODES" ]
} &&
srun --nodes=8 --ntasks=8 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "$llmb_python" -P -m \
    llmb.launch.ranks 8 4 "$llmb_python" -P -m llmb.launch.bind cores local "$llmb_python" -P -m \
    llmb.engine.worker "$llmb_folder"
llmb_exit_code=$?
if [ -n "${llmb_boost_in:-}" ]; then
    exec {llmb_boost_in}>&-
    wait "$llmb_boost_step"
fi
exit $llmb_exit_code
} \
    >>"$llmb_folder"/log-lora_llama3_70b_bf16_gpus32_tp1_pp4_cp1_vp20_ep1_mbs1_gbs256_gb200_synthetic.out 2>&1 </dev/null &
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
