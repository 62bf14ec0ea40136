# SPDX-License-Identifier: Apache-2.0
"""Whether the engine keeps a micro-batch's logits for the backward pass, by their size. Pure."""

from llmb.catalogue.records import Dtype, Recipe

LARGEST_PART = 1 / 32
"""Share of the GPU's memory for logits that are kept: 2.5 GB of 80, 4.4 GB of 141.

They save one of four products of the head, 1 to 2 % of a step, and exist when activations are at their peak. A layout
that fits has to leave as much free for what is in no plan: the CUDA context, NCCL's buffers and fragmentation.
"""


def logits_gb(recipe: Recipe) -> float:
    """Size in 10^9 bytes of one micro-batch's logits on a rank that computes them, in the run's dtype."""
    layout = recipe.layout
    rows, columns = layout.mbs * layout.seq_len / layout.cp, recipe.model.vocab_size / layout.tp
    return rows * columns * (4 if recipe.dtype is Dtype.FP32 else 2) / 1e9


def keeps_logits(recipe: Recipe) -> bool:
    """The default: where they fit, so not where the memory is unknown, as a CPU's and that of another GPU's.

    Not for a frozen head, which has no gradient.
    """
    if recipe.gpu_memory_gb is None or recipe.lora is not None:
        return False
    return logits_gb(recipe) <= LARGEST_PART * recipe.gpu_memory_gb


def logits_text(recipe: Recipe, *, kept: bool) -> str:
    """What the engine does with them, for users."""
    size = logits_gb(recipe)
    whole = f"{size:.1f} GB" if size >= 1 else f"{1e3 * size:.3g} MB"
    if kept:
        return f"{whole} per micro-batch, kept for the backward pass"
    if recipe.lora is not None:
        return "chunked"
    return "chunked, recomputed for the backward pass unless small" + (f" (all: {whole})" if size >= 1e-3 else "")
