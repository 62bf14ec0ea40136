#!/bin/bash
# pretrain_llama3.1 405b fp8 on 1024 x h100, by llmb, with megatron_bridge v0.4.2
#SBATCH --nodes=128
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --job-name=pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge
#SBATCH --time=00:30:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --account=research
#SBATCH --partition=batch
#SBATCH --output=/lustre/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge_1700000000/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge/sbatch_pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge.out
#SBATCH --open-mode=append
#SBATCH --chdir=/lustre/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge_1700000000/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge

unset SLURM_JWT  # the submitter's token, which the job does not need
export CUDA_DEVICE_MAX_CONNECTIONS=1  # megatron_bridge
export NCCL_NVLS_ENABLE=0  # megatron_bridge
export NVTE_BWD_LAYERNORM_SM_MARGIN=16  # megatron_bridge
export NVTE_FWD_LAYERNORM_SM_MARGIN=16  # megatron_bridge
export TOKENIZERS_PARALLELISM=False  # megatron_bridge
export TORCH_NCCL_AVOID_RECORD_STREAMS=1  # megatron_bridge
export TORCH_NCCL_HIGH_PRIORITY=1  # megatron_bridge
export TRANSFORMERS_OFFLINE=1  # megatron_bridge
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

llmb_folder=/lustre/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge_1700000000/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge
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
# The samplers end when the pipe to them is closed. If one does not start, the run continues without it.
exec {llmb_sampled}> >(exec srun --nodes=128 --ntasks=128 --ntasks-per-node=1 --cpu-bind=none --overlap --mem=0 bash -c \
    'exec "$1" -P -m llmb.readers.samples.sampler "$2/resources/$SLURMD_NODENAME.jsonl" "$SLURMD_NODENAME" 5 cuda $PPID' \
    llmb-sampler "$llmb_python" "$llmb_folder" >/dev/null 2>&1) && llmb_sampler=$! &&
srun --nodes=128 --ntasks=1024 --ntasks-per-node=8 --kill-on-bad-exit=1 --cpu-bind=none \
    '--container-image=nvcr.io#nvidia/nemo:26.04.01' \
    --container-mounts=/datasets:/datasets,/lustre/bench:/lustre/bench --no-container-mount-home \
    --container-writable sh -c \
    'ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"; export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE" TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE))}"; exec "$@"' \
    llmb-task bash -c \
    'found=; while read -r name _ value; do case $name in MAJOR|MINOR) found="${found:+$found.}$value";; esac; done </opt/Megatron-Bridge/src/megatron/bridge/package_info.py; case "$found" in 0.4) :;; *) echo "llmb: this image has megatron_bridge ${found:-of an unknown version}, and this job needs 0.4 for llama31_405b" >&2; exit 2;; esac; exec numactl --cpunodebind=$((LOCAL_RANK/4)) --membind=$((LOCAL_RANK/4)) "$@"' \
    llmb-bind python /opt/Megatron-Bridge/scripts/performance/run_script.py --model_family_name llama \
    --model_recipe_name llama31_405b --task pretrain --gpu h100 --compute_dtype fp8_cs --num_gpus 1024 --max_steps \
    50 --global_batch_size 512 --data mock --save_dir \
    /lustre/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge_1700000000/pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge/checkpoints \
    --save_interval 50 --save_config_filepath "$llmb_folder"/ConfigContainer.yaml rng.seed=7
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
    >>"$llmb_folder"/log-pretrain_llama3.1_405b_fp8_gpus1024_tp8_pp8_cp2_vp8_ep1_mbs1_gbs512_h100_megatron_bridge.out 2>&1 </dev/null &
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
