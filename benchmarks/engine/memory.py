# SPDX-License-Identifier: Apache-2.0
"""An estimate of the GPU memory that a case needs, so that one that cannot fit is not started. Pure."""

from benchmarks.engine.cases import Case
from benchmarks.engine.engines.registry import ENGINES
from llmb.catalogue.records import Dtype, Model
from llmb.catalogue.throughput import parameter_count

GB = 1e9
CONTEXT_BYTES = 2.5e9
"""Of CUDA, NCCL and the libraries of matrix products."""
BF16_BYTES = 2


def needed_bytes(case: Case) -> float:
    """Parameters with gradients and optimizer, what layers keep for the backward pass, logits, and CUDA itself.

    It counts tensors: what the allocator rounds up and kernels need for themselves is not in it, so that a case above
    the GPU's memory fails for certain and one just below it may.
    """
    recipe, memory = case.subject.recipe, ENGINES[case.engine].memory
    tokens = recipe.layout.mbs * recipe.layout.seq_len
    state = memory.bytes_per_parameter + (memory.more_in_fp8 if recipe.dtype is Dtype.FP8 else 0)
    logits = tokens * recipe.model.vocab_size * memory.bytes_per_logit
    layers = recipe.model.layers * tokens * kept_per_token(recipe.model) * BF16_BYTES
    return parameter_count(recipe.model)[0] * state + layers + logits + CONTEXT_BYTES


def kept_per_token(model: Model) -> int:
    """Values that a layer keeps for its backward pass: inputs of norms and products, heads, and activations."""
    heads = 2 * model.attention_heads * model.head_dim + 2 * model.kv_heads * model.head_dim
    states = 3 if model.mlp == "swiglu" else 2
    return 4 * model.hidden_size + heads + states * model.ffn_hidden_size


def obstacle(case: Case, gpu_memory_bytes: float | None) -> str | None:
    """Why the case cannot fit into the GPU's memory; None if it may, or if the memory is unknown."""
    needed = needed_bytes(case)
    if gpu_memory_bytes is None or needed <= gpu_memory_bytes:
        return None
    return f"memory: does not fit, needs about {needed / GB:.0f} GB of {gpu_memory_bytes / GB:.0f} GB"
