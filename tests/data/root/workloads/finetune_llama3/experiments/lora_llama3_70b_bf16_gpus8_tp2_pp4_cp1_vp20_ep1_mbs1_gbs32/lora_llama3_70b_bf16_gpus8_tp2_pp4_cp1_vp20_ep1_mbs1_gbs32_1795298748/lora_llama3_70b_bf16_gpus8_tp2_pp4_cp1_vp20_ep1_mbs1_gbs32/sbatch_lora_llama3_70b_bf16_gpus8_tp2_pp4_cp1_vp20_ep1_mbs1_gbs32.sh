#!/bin/bash
# finetune_llama3 70b bf16 on 8 x h100, by llmb, with megatron_bridge v0.4.2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --job-name=lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32
#SBATCH --time=00:15:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --partition=gpu
#SBATCH --output=/cluster/bench/workloads/finetune_llama3/experiments/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32_1795298748/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32/sbatch_lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32.out
#SBATCH --open-mode=append
#SBATCH --chdir=/cluster/bench/workloads/finetune_llama3/experiments/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32_1795298748/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32

export TORCH_NCCL_AVOID_RECORD_STREAMS=1  # megatron_bridge
export TORCH_NCCL_HIGH_PRIORITY=1  # megatron_bridge
export TRANSFORMERS_OFFLINE=1  # megatron_bridge
export TOKENIZERS_PARALLELISM=False  # megatron_bridge
export NCCL_NVLS_ENABLE=0  # megatron_bridge
export NVTE_FWD_LAYERNORM_SM_MARGIN=16  # megatron_bridge
export NVTE_BWD_LAYERNORM_SM_MARGIN=16  # megatron_bridge
export CUDA_DEVICE_MAX_CONNECTIONS=1  # megatron_bridge
export PYTHONUNBUFFERED=1  # the shell that submitted
llmb_threads=$((${SLURM_CPUS_ON_NODE:-1} / 8))
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

llmb_folder=/cluster/bench/workloads/finetune_llama3/experiments/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32_1795298748/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32
llmb_python=/cluster/venv/bin/python
trap llmb_leave EXIT
trap 'llmb_end TERM' TERM
trap 'llmb_end USR1' USR1

# The first node as Slurm reaches it: its name need not be known to the others.
llmb_address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
llmb_known=$(scontrol -o show node "$llmb_address" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
llmb_address="${llmb_known:-$llmb_address}"
llmb_port=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR="$llmb_address"
export MASTER_PORT="$llmb_port"

"$llmb_python" -m llmb.launch.slurm.begin "$llmb_folder" || exit $?
[ -z "$llmb_signal" ] || exit 143

srun --nodes=1 --ntasks=8 --ntasks-per-node=8 --kill-on-bad-exit=1 --cpu-bind=none apptainer exec --nv --bind \
    /cluster/bench docker://nvcr.io/nvidia/nemo:26.04.01 sh -c \
    'export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"; exec "$@"' \
    llmb-task bash -c 'exec numactl --cpunodebind=$((SLURM_LOCALID/4)) --membind=$((SLURM_LOCALID/4)) "$@"' \
    llmb-bind python /opt/Megatron-Bridge/scripts/performance/run_script.py --model_family_name llama \
    --model_recipe_name llama3_70b --task lora --gpu h100 --compute_dtype bf16 --num_gpus 8 --max_steps 20 \
    --tensor_model_parallel_size 2 --pipeline_model_parallel_size 4 --virtual_pipeline_model_parallel_size 20 \
    --context_parallel_size 1 --micro_batch_size 1 --global_batch_size 32 --seq_length 4096 --data mock \
    --save_config_filepath "$llmb_folder"/ConfigContainer.yaml model.seq_length=4096 model.num_layers=80 \
    >>"$llmb_folder"/log-lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32.out 2>&1 </dev/null &
llmb_workers=$!
while :; do
    llmb_woken=
    wait "$llmb_workers"
    llmb_exit_code=$?
    # A signal ends 'wait' before the workers have ended.
    [ -n "$llmb_woken" ] || break
done

"$llmb_python" -m llmb.launch.frameworks.finish "$llmb_folder" "$llmb_exit_code" "$llmb_signal" || echo "llmb: the result could not be written here" >&2
exit "$llmb_exit_code"
