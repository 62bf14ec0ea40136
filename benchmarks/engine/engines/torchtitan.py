# SPDX-License-Identifier: Apache-2.0
"""torchtitan 0.2.2: its Llama model, its compilation and its precision on one GPU, without its trainer's data."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.engines.job import Job
from benchmarks.engine.engines.loop import PlainTrainee, adamw, run_adapter
from llmb.catalogue.records import Dtype, Model


def build(job: Job) -> PlainTrainee:
    """What torchtitan's trainer sets up for one GPU: fp32 weights under autocast, compiled blocks."""
    llama: Any = import_module("torchtitan.models.llama3")
    parallelize: Any = import_module("torchtitan.models.llama3.infra.parallelize")
    with torch.device(job.device), torch.no_grad():
        model = llama.Transformer(model_arguments(job.model, job.seq_len))
        model.init_weights()
    versions = {}
    if job.dtype is Dtype.FP8:
        versions["torchao"] = use_fp8(model)
    losses: Any = import_module("torchtitan.components.loss")
    entropy = losses.cross_entropy_loss
    if job.compiled:
        settings: Any = import_module("torchtitan.config.job_config")
        parallelize.apply_compile(model, settings.Compile(enable=True))
        entropy = torch.compile(entropy)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(job.device, dtype=torch.bfloat16, enabled=job.dtype is not Dtype.FP32):
            total: Tensor = entropy(model(tokens), labels)
            return total / labels.numel()

    return PlainTrainee(
        model=model,
        loss=loss,
        optimizer=adamw(list(model.parameters()), job),
        clip_grad=job.training.clip_grad,
        conventions=(
            "weights, gradients and Adam's moments in fp32, blocks under bf16 autocast",
            "SDPA attention, cuDNN before flash",
            "compiled block by block, and the loss" if job.compiled else "not compiled",
            *(("linear layers but the head in fp8 by torchao, tensorwise dynamic scaling",) if versions else ()),
        ),
        versions=versions,
    )


def model_arguments(model: Model, seq_len: int) -> Any:  # noqa: ANN401 (torchtitan's class)
    """torchtitan rounds the feed-forward size up to ``multiple_of``, which can therefore set an exact size."""
    arguments: Any = import_module("torchtitan.models.llama3.model.args")
    scaling = model.rope_scaling
    assert scaling is not None, "torchtitan's Llama always scales rotary frequencies"
    return arguments.TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.layers,
        n_heads=model.attention_heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.vocab_size,
        multiple_of=model.ffn_hidden_size,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        rope_scaling_args=arguments.RoPEScalingArgs(
            scaling_factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_position,
        ),
        max_seq_len=seq_len,
    )


def use_fp8(model: torch.nn.Module) -> str:
    """As torchtitan's float8 converter does without the head; returns torchao's version."""
    float8: Any = import_module("torchao.float8")
    utils: Any = import_module("torchtitan.components.quantization.utils")
    float8.convert_to_float8_training(
        model, module_filter_fn=lambda module, name: utils.module_filter_fn(module, name, ["output"])
    )
    return str(import_module("torchao").__version__)


if __name__ == "__main__":
    run_adapter(build)
