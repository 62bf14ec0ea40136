# SPDX-License-Identifier: Apache-2.0
"""docs/reference/what-is-the-same.md: a step of llmb beside the step that was published."""

from collections.abc import Iterator

from llmb.catalogue.load import Catalogue
from llmb.catalogue.published import Document, PublishedCondition
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import Request, resolve
from llmb.catalogue.schema import ConditionEntry, LayoutTable, WorkloadFile
from llmb.runs.choices import Choices
from llmb.runs.plan import make_plan
from llmb.runs.published_verdict import ways_of_engine
from llmb.verdict.conditions import title_of
from reference_pages.markdown import page, table

INTRO = """A step time can be compared with a published one if the step does the same work. This page is for whoever
reads a verdict against a published figure and asks what is not equal. It is about the engine of llmb with the recipe's
own settings; `llmb show` lists the same of one recipe, and each verdict names what differs for the run at hand.

Everything here was read in the code that ran, at the commits that each release pins. **Estimates are from sizes and
bandwidths, not measured**: how much slower a step is without the framework's way."""
EQUAL = """## The same in all documents

Layers, hidden size, FFN, heads and their size, untied embeddings, no biases of linear layers, no dropout; causal flash
attention; RMSNorm and SwiGLU, or zero-centred LayerNorm with bias and squared ReLU; rotary base and fraction; sequence
length, micro and global batch, TP, PP, VP, CP, EP, ETP, sequence parallelism; embedding and loss as pipeline layers
where a layout counts them; no recomputation and no offload; uniform random tokens without a mask, or packed SQuAD;
cross entropy in fp32 over bf16 logits; the head in bf16; gradients summed and reduced in bf16; fp32 master weights and
moments; AdamW and clipping; FP8 in all four products of a layer and not in attention, e4m3 forward and e5m2 backward;
no validation and no checkpoint within the steps. Maverick: text model, one routed and one shared expert, no auxiliary
loss. LoRA: rank, alpha, dropout and the fused QKV projection.

Different without an effect on time: standard deviation of initial values, rotary base of 24.11, scaling of rotary
frequencies in 25.04's 8b and 70b. `scripts/check_sources.py` compares item by item what of all this can be read in the
published code."""
SMALLER = """## Smaller differences in all pre-training documents"""
SMALLER_ROWS = (
    (
        "weight gradient of the head",
        "left for the pipeline's drain (70b, 405b, 340b)",
        "in place, on the last stage",
        "340b 2 to 4 % slower, 70b below 1 %",
    ),
    (
        "gradients of embedding, last norm and head",
        "reduced per bucket, overlapped",
        "reduced after a stage's last backward pass; those of blocks overlap",
        "below 1 % slower",
    ),
    (
        "sum of the head's weight gradient",
        "by the product",
        "after it, as in FP8 that of every matrix",
        "below 1 % slower",
    ),
    (
        "FP8 parameters",
        "1 byte and a transpose, gathered in FP8",
        "bf16 and two casts, gathered in bf16",
        "2 bytes a parameter, twice the bytes gathered",
    ),
    (
        "largest values in FP8",
        "reduced for each micro-batch, chunk and direction",
        "once a step",
        "below 1 % faster",
    ),
    (
        "context parallelism",
        "a ring, overlapped",
        "one gather of keys and values",
        "about 1 % slower",
    ),
    (
        "streaming multiprocessors left by norms",
        "16",
        "none",
        "up to 1 % faster",
    ),
    (
        "streams of NCCL",
        "of ordinary priority (24.11, 25.04)",
        "`TORCH_NCCL_HIGH_PRIORITY=1`, so that collectives do not queue behind products",
        "not known",
    ),
    (
        "buffers of point-to-point transfers",
        "`NCCL_P2P_NET_CHUNKSIZE` where PP is above 1",
        "the same, where `llmb show` lists it",
        "up to 2 %",
    ),
)
LORA = """## Smaller differences of LoRA, 25.12"""
LORA_ROWS = (
    (
        "loss",
        "not fused (`cross_entropy_loss_fusion=False`), all logits in fp32",
        "in chunks, whose logits are not kept in fp32",
        "1 to 2 GB of memory less, time about the same",
    ),
    (
        "streams of NCCL",
        "`TORCH_NCCL_HIGH_PRIORITY=1`",
        "the same",
        "none",
    ),
)
TP_OVERLAP = """## Communication of tensor parallelism

A layer has 8 collectives with sequence parallelism: each of its two parts gathers its input and scatters its output,
and the backward pass does the same with gradients. NeMo's userbuffers overlap all of them with products. llmb overlaps
the two that scatter gradients of inputs, and those that gather the inputs again for the gradients of weights; the
others are exposed, in FP8 those of inputs with half of the bytes
([table](../explanation/parallelism.md#overlap-of-communication-and-computation))."""
GRAPHS = """## CUDA graphs

NeMo replays each layer as a CUDA graph in Maverick's fine-tuning and, on GB200, in LoRA's. llmb has none: it names the
condition, and does not correct for it. What stands in the way, and what is there already:

- Shapes are static where every expert computes as many rows (`capacity_factor`), and no host waits for the GPU in such
  a step; the tests run it with tensors that have no values.
- Missing: boundaries of packed documents in tensors of a fixed size, static addresses of parameters that FSDP gathers,
  and a proof on a GPU that a replayed step is equal to the bit. What cannot be tried on a GPU is not shipped."""


def same_page(catalogue: Catalogue) -> str:
    parts = [section(catalogue, document) for document in catalogue.documents.values()]
    smaller = table(["item", "framework", "llmb", "estimate"], SMALLER_ROWS)
    of_lora = table(["item", "framework", "llmb", "estimate"], LORA_ROWS)
    return page("# What is the same", INTRO, EQUAL, *parts, SMALLER, smaller, LORA, of_lora, TP_OVERLAP, GRAPHS)


def section(catalogue: Catalogue, document: Document) -> str:
    columns = ["item", "framework", "llmb", "same", "without it", "what it is", "source"]
    rows = [row(catalogue, document, entry) for entry in catalogue.published[document.document].conditions]
    return page(f"## {document.title}, {document.release}", table(columns, rows))


def row(catalogue: Catalogue, document: Document, entry: ConditionEntry) -> list[object]:
    recipe = example(catalogue, document, entry)
    own = ways_of_engine(make_plan(recipe, Choices(synthetic=recipe.task != "pretrain"), device="cuda")).get(entry.key)
    where = ", ".join([*entry.sizes, *entry.dtypes, *entry.gpu_types])
    title = title_of(entry.key) + (f" ({where})" if where else "")
    same = "not known" if own is None else "yes" if own == entry.value else "no"
    return [title, entry.value, own or "with `vboost: recipe`", same, slower(entry), entry.what, entry.source]


def slower(condition: PublishedCondition) -> str:
    return "{:g} to {:g} % slower".format(*condition.slower_pct) if condition.slower_pct else ""


def example(catalogue: Catalogue, document: Document, entry: ConditionEntry) -> Recipe:
    """The first recipe of the document that the entry is about, where ranks share parameters."""
    for workload, layout in layouts(catalogue, document):
        for gpu_type in layout.gpu_types:
            for dtype in layout.dtypes:
                if entry.holds_for(layout.size, dtype, gpu_type):
                    scale = max(item.gpus for item in layout.rows)
                    request = Request(
                        workload=workload.workload, size=layout.size, dtype=dtype, gpu_type=gpu_type, scale=scale,
                        release=document.release,
                    )  # fmt: skip
                    return resolve(catalogue, request)
    raise ValueError(f"no recipe of {document.document} has {entry.key}")


def layouts(catalogue: Catalogue, document: Document) -> Iterator[tuple[WorkloadFile, LayoutTable]]:
    for workload in catalogue.workloads.values():
        for layout in workload.layouts:
            if layout.document == document.document:
                yield workload, layout
