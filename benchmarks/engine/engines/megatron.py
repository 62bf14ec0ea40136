# SPDX-License-Identifier: Apache-2.0
"""Megatron-core with Transformer Engine on one GPU: its model, gradient buffers and optimizer, without its trainer."""

import os
import tempfile
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engine.engines.job import Job
from benchmarks.engine.engines.loop import run_adapter
from llmb.catalogue.records import Dtype, Model, Training


class MegatronTrainee:
    """Megatron-core keeps gradients in its own buffers and clips within its optimizer."""

    def __init__(self, model: Any, optimizer: Any, parameters: int, fp8: bool) -> None:  # noqa: ANN401
        self.model = model
        self.optimizer = optimizer
        self.parameters = parameters
        self.versions = {name: str(import_module(name).__version__) for name in ("megatron.core", "transformer_engine")}
        self.conventions: tuple[str, ...] = (
            "weights and gradients in bf16, fp32 master weights and moments",
            "attention and fused layers by Transformer Engine",
            *(("linear layers but the head in fp8, delayed scaling",) if fp8 else ()),
        )

    def add_gradients(self, tokens: Tensor, share: float) -> Tensor:
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        loss: Tensor = self.model(inputs, positions, None, labels=labels).mean()
        (loss * share).backward()
        return loss.detach()

    def update(self) -> None:
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()


def build(job: Job) -> MegatronTrainee:
    core: Any = import_module("megatron.core")
    gpt: Any = import_module("megatron.core.models.gpt")
    specs: Any = import_module("megatron.core.models.gpt.gpt_layer_specs")
    join_alone()
    core.parallel_state.initialize_model_parallel()
    core.tensor_parallel.model_parallel_cuda_manual_seed(job.seed)
    shape = job.model
    config = transformer_config(shape, fp8=job.dtype is Dtype.FP8)
    scaling = shape.rope_scaling
    model = gpt.GPTModel(
        config,
        specs.get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=shape.vocab_size,
        max_sequence_length=job.seq_len,
        position_embedding_type="rope",
        rotary_percent=shape.rotary_fraction,
        rotary_base=int(shape.rope_theta),
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling.factor if scaling else 1.0,
    ).cuda()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    wrapped, optimizer = buffered(model, config, job.training)
    return MegatronTrainee(wrapped, optimizer, parameters, job.dtype is Dtype.FP8)


def join_alone() -> None:
    """A process group of this process alone, which Megatron-core requires."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    file = tempfile.NamedTemporaryFile(prefix="megatron-", delete=False)  # noqa: SIM115 (lives as long as the process)
    dist.init_process_group("nccl", init_method=f"file://{file.name}", rank=0, world_size=1)


def transformer_config(model: Model, *, fp8: bool) -> Any:  # noqa: ANN401 (Megatron's class)
    transformer: Any = import_module("megatron.core.transformer")
    activations: Any = import_module("megatron.core.activations")
    gated = model.mlp == "swiglu"
    zero_centered = model.norm == "layernorm1p"
    precision = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    return transformer.TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else activations.squared_relu,
        normalization="LayerNorm" if zero_centered else "RMSNorm",
        layernorm_zero_centered_gamma=zero_centered,
        layernorm_epsilon=model.norm_eps,
        init_method_std=model.init_std,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        apply_rope_fusion=True,
        bias_activation_fusion=gated,
        persist_layer_norm=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        gradient_accumulation_fusion=find_spec("fused_weight_gradient_mlp_cuda") is not None,
        **(precision if fp8 else {}),
    )


def buffered(model: Any, config: Any, training: Training) -> tuple[Any, Any]:  # noqa: ANN401 (Megatron's classes)
    """Megatron-core's wrapper with gradient buffers, and its optimizer."""
    distributed: Any = import_module("megatron.core.distributed")
    optimizers: Any = import_module("megatron.core.optimizer")
    module: Any = import_module("megatron.core.transformer.module")
    wrapped = distributed.DistributedDataParallel(
        config,
        distributed.DistributedDataParallelConfig(use_distributed_optimizer=True),
        module.Float16Module(config, model),
    )
    settings = optimizers.OptimizerConfig(
        optimizer="adam",
        lr=training.peak_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.beta1,
        adam_beta2=training.beta2,
        adam_eps=training.eps,
        clip_grad=training.clip_grad,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    return wrapped, optimizers.get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)


if __name__ == "__main__":
    run_adapter(build)
