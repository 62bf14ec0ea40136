# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers with torch.compile, as it is usually trained: bf16 weights, SDPA attention, fused AdamW."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.engine.engines.job import Job
from benchmarks.engine.engines.loop import PlainTrainee, adamw, run_adapter
from llmb.catalogue.records import Dtype
from llmb.runs.huggingface.model_config import config_of

WHOLE = "huggingface-whole"
FP32 = "huggingface-fp32"
"""fp32 weights, gradients and moments, computing under bf16 autocast: the precisions of llmb and torchtitan."""


def build(job: Job) -> PlainTrainee:
    """Random weights, with the configuration that llmb exports for its own model."""
    transformers: Any = import_module("transformers")
    fp32 = job.dtype is Dtype.FP32 or job.engine == FP32
    config = transformers.AutoConfig.for_model(**config_of(job.model, "fp32" if fp32 else "bf16"))
    with torch.device(job.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32 if fp32 else torch.bfloat16
        )
    model.train()
    versions = {"transformers": str(transformers.__version__)}
    if job.dtype is Dtype.FP8:
        versions["torchao"] = use_fp8(model)
    kept = "fp32" if fp32 else "bf16"
    conventions = (
        f"weights, gradients and Adam's moments in {kept}"
        + (", computed under bf16 autocast" if autocasts(job) else ", no master copy"),
        "SDPA attention, backend chosen by torch",
        "gradients clipped by torch, AdamW fused, weight decay on all parameters",
        *(
            ("linear layers but the head in fp8 by torchao, tensorwise dynamic scaling",)
            if "torchao" in versions
            else ()
        ),
        compiled_how(job),
    )
    if job.model.moe:
        conventions += ("transformers multiplies every expert with every token",)
    return PlainTrainee(
        model=model,
        loss=under_autocast(loss_function(model, job), job),
        optimizer=adamw(list(model.parameters()), job),
        clip_grad=job.training.clip_grad,
        conventions=conventions,
        versions=versions,
    )


def autocasts(job: Job) -> bool:
    return job.engine == FP32 and job.dtype is not Dtype.FP32


def under_autocast(loss: Callable[[Tensor, Tensor], Tensor], job: Job) -> Callable[[Tensor, Tensor], Tensor]:
    def computed(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(job.device, dtype=torch.bfloat16):
            return loss(tokens, labels)

    return computed if autocasts(job) else loss


def compiled_how(job: Job) -> str:
    if not job.compiled:
        return "not compiled"
    return "compiled as a whole" if job.engine == WHOLE else "compiled layer by layer, head and loss together"


def loss_function(model: Any, job: Job) -> Callable[[Tensor, Tensor], Tensor]:  # noqa: ANN401 (transformers' class)
    """Layers are compiled one by one, as they share their code; head and loss as one graph."""
    head_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = cross_entropy
    if job.compiled and job.engine != WHOLE:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        head_loss = torch.compile(cross_entropy, dynamic=False)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return head_loss(hidden, model.lm_head.weight, labels)

    return torch.compile(loss, dynamic=False) if job.compiled and job.engine == WHOLE else loss


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Mean over all labels, from fp32 logits, as transformers computes it."""
    logits = functional.linear(hidden, head).flatten(0, 1).float()
    return functional.cross_entropy(logits, labels.flatten())


def use_fp8(model: nn.Module) -> str:
    """Replaces linear layers in place, and returns torchao's version."""
    float8: Any = import_module("torchao.float8")
    float8.convert_to_float8_training(model, module_filter_fn=takes_fp8)
    return str(import_module("torchao").__version__)


def takes_fp8(module: nn.Module, name: str) -> bool:
    """FP8 products need dimensions that are multiples of 16; head and router stay in bf16.

    So does the last layer of Llama 4's shared expert: transformers adds to its output in place, which torchao forbids.
    """
    kept = ("lm_head", "router", "shared_expert.down_proj")
    if not isinstance(module, nn.Linear) or any(part in name for part in kept):
        return False
    return all(size % 16 == 0 for size in module.weight.shape)


if __name__ == "__main__":
    run_adapter(build)
