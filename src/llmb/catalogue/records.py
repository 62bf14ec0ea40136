# SPDX-License-Identifier: Apache-2.0
"""Typed, frozen records of everything the catalogue holds."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from llmb.catalogue.upgrade import upgraded_model


class Record(BaseModel):
    """Base of all records that cross a file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Dtype(StrEnum):
    """Compute precision of a run."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


GradReduceDtype = Literal["fp32", "bf16"]


class Convention(StrEnum):
    """How the model FLOPs of one sequence are counted (see docs/explanation/flops-and-mfu.md)."""

    PUBLISHED = "published"
    FULL = "full"
    CAUSAL = "causal"


class Gpu(Record):
    """One GPU type. Peaks are dense; bandwidths are per GPU; ``nvlink_gb_s`` adds both directions."""

    gpu_type: str
    name: str
    peak_tflops: dict[str, float]
    memory_gb: float
    memory_bandwidth_tb_s: float
    nvlink_gb_s: float
    nvlink_domain_gpus: int
    network_gb_s: float | None = None
    tdp_w: float | None = None
    gpus_per_node: int
    device_names: tuple[str, ...]
    """Patterns (glob) of the driver's device names that are this very variant."""
    borrows: tuple[str, ...] = ()
    """Types whose published layouts it takes where a workload publishes none for it, the closest first."""
    nvlink_c2c: bool = False
    """NVLink connects it with its host's CPU, too."""
    sources: dict[str, str]
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _every_figure_has_a_source(self) -> Self:
        sourced = ("peak_tflops", "memory_gb", "memory_bandwidth_tb_s", "nvlink_gb_s", "network_gb_s", "tdp_w")
        missing = [name for name in sourced if getattr(self, name) is not None and name not in self.sources]
        if missing:
            raise ValueError(f"{self.gpu_type} states no source for {', '.join(missing)}")
        return self


class RopeScaling(Record):
    """Llama 3.1's frequency scaling of rotary embeddings."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


Router = Literal["sigmoid-scaled-inputs", "softmax-weighted-outputs"]
"""What becomes of the logits of a token's chosen experts, and what it is multiplied with.

``sigmoid-scaled-inputs`` (Llama 4): each logit's sigmoid scales the token before its expert.
``softmax-weighted-outputs`` (Mixtral): the softmax over the chosen logits weights what the experts return.
"""


class MixtureOfExperts(Record):
    """Expert layers: every ``interleave``-th layer, counted so that layer ``interleave - 1`` is the first."""

    router: Router
    experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int | None = None
    """Of an expert that every token passes beside the chosen ones; null without one."""
    interleave: int


class ChunkedAttention(Record):
    """Chunks, but on each ``global_every``-th layer neither chunks nor rotary: a temperature by position (Llama 4)."""

    chunk_size: int
    global_every: int
    floor_scale: float
    attn_scale: float


Norm = Literal["rmsnorm", "layernorm1p"]
"""``layernorm1p`` keeps its weight as the distance from one, and has a bias."""
Mlp = Literal["swiglu", "squared-relu"]
"""Feed-forward layers, experts included: gated SiLU with three matrices, or a squared ReLU between two."""
RotaryPairs = Literal["halves", "interleaved"]
"""Which elements of a head are rotated together: i and i + half, or 2i and 2i + 1."""


class Model(Record):
    """The true architecture of one model, by its parts. Sizes are in elements. No matrix has a bias."""

    model: str
    size: str
    norm: Norm
    mlp: Mlp
    rotary_pairs: RotaryPairs = "halves"
    qk_norm: Literal["rmsnorm"] | None = None
    """A norm of each query and key head, before rotary."""
    tied_embeddings: bool = False
    """Embedding and head are one matrix."""
    layers: int
    hidden_size: int
    ffn_hidden_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    rope_theta: float
    rotary_fraction: float = 1.0
    rope_scaling: RopeScaling | None = None
    init_std: float
    moe: MixtureOfExperts | None = None
    chunked_attention: ChunkedAttention | None = None
    """Null where each query sees every earlier position of its document."""
    source: str

    @model_validator(mode="after")
    def _experts_are_gated(self) -> Self:
        if self.moe is not None and self.mlp != "swiglu":
            raise ValueError(f"experts are gated: mlp is {self.mlp}, swiglu is needed")
        return self

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer % self.moe.interleave == self.moe.interleave - 1

    def is_global_layer(self, layer: int) -> bool:
        """True for a layer whose attention sees every earlier position."""
        return self.chunked_attention is None or (layer + 1) % self.chunked_attention.global_every == 0


RecordedModel = Annotated[Model, BeforeValidator(upgraded_model)]
"""Of a file that version 0.1 may have written."""


class Layout(Record):
    """How a model is spread over GPUs and how its batch is cut. ``vp`` is 1 without virtual stages."""

    gpus: int
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    mbs: int
    gbs: int
    seq_len: int
    layers: int
    counts_embedding_and_loss: bool = False
    """The pipeline split counts the embedding and the loss as one layer each."""
    first_stage_layers: int | None = None
    """Layers of the first of the PP x VP stages, where it has a size of its own; the embedding then counts nothing."""
    last_stage_layers: int | None = None
    """Likewise of the last stage; the loss then counts nothing."""
    sequence_parallel: bool = True
    """Between the layers that TP cuts, its ranks hold a part of the sequence each; without, all hold all of it."""

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Expert-data-parallel size: how many times the routed experts are there."""
        return self.gpus // (self.etp * self.ep * self.pp)

    @property
    def ga(self) -> int:
        """Micro-batches that one step accumulates."""
        return self.gbs // (self.mbs * self.dp)

    @property
    def pipeline_layers(self) -> int:
        """Layers as the pipeline split counts them."""
        counted = self.counts_embedding_and_loss and self.pp > 1 and not self.has_own_split
        return self.layers + (2 if counted else 0)

    @property
    def has_own_split(self) -> bool:
        """The first or the last stage has a number of layers of its own."""
        return self.first_stage_layers is not None or self.last_stage_layers is not None


class Training(Record):
    """Optimizer, schedule and data of a run."""

    peak_lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_grad: float
    grad_reduce_dtype: GradReduceDtype = "fp32"
    """What gradients of micro-batches and of ranks are added up in; a run that computes in fp32 uses fp32."""
    data: Literal["uniform", "zipf"]
    """Synthetic tokens: uniform as in the reference suite, or Zipf-distributed, from which a model can learn."""
    document_tokens: int | None = None
    """Mean tokens of the documents that sequences are packed from; null for sequences of one text."""


class Packing(Record):
    """Statistics of sequences packed from documents, per packed sequence."""

    tokens: float
    sum_of_squares: float
    chunked_sum_of_squares: float | None = None
    """The same of documents cut into the model's attention chunks; null where no document is longer than a chunk."""
    source: str


class Window(Record):
    """The steps that statistics are taken over, numbered from 0, both ends included."""

    first: int
    last: int
    rule: str


class Document(Record):
    """A source of published figures: the steps it takes them from, and the steps it profiles."""

    document: str
    title: str
    source: str
    release: str
    window: str
    profile: dict[Literal["start", "stop"], int]
    convention: str
    notes: tuple[str, ...] = ()


class Expectation(Record):
    """A published figure, as published. A figure the document does not print is null."""

    kind: Literal["table", "example"]
    step_time_s: float | None
    tokens_per_s: float | None
    mfu_pct: float | None
    days_per_1t_tokens: float | None
    tflops_per_gpu: float | None = None
    convention: str
    peak_tflops: float | None
    """The peak that the document's MFU column was computed with."""
    source: str
    line: int
    release: str
    window: str
    notes: tuple[str, ...]


class PublishedFlops(Record):
    """How the source document counts the model FLOPs of one sequence."""

    formula: Literal["full", "causal", "two thirds of causal"]
    as_published: dict[str, int] = Field(default_factory=dict)
    """Sizes the document gives wrongly, used for its own formula only."""
    printed_flops: float | None
    """The value the document prints for this depth and sequence length, where it prints one."""
    source: str
    line: int | None
    notes: tuple[str, ...] = ()


class Checkpoint(Record):
    """What the documents say of a size's checkpoint."""

    size_gb: float
    save_scales: tuple[int, int] | None = None
    min_load_scale: int | None = None
    source: str
    line: int
    notes: tuple[str, ...] = ()


class Recipe(Record):
    """One thing that can be run: workload x size x dtype x GPU type x scale, fully resolved."""

    workload: str
    size: str
    dtype: Dtype
    gpu_type: str
    scale: int
    release: str | None
    document: Document | None
    """Where the layout was published; null for one of llmb's own."""
    task: Literal["pretrain", "lora", "sft"]
    proxy: bool
    model: RecordedModel
    layout: Layout
    training: Training
    packing: Packing | None
    published_flops: PublishedFlops | None
    expectations: tuple[Expectation, ...]
    expectations_reason: str | None
    """Why there is no expectation, when there is none."""
    checkpoint: Checkpoint | None
    peak_tflops: float | None
    notes: tuple[str, ...]


class JobVariable(Record):
    """A variable of a recipe's or a fabric's jobs, and who sets it."""

    name: str
    value: str
    source: str


class JobDefaults(Record):
    """What a scheduler is asked for to run a recipe, unless the site or the user says otherwise."""

    time_limit_min: int
    time_limit_source: str
    gpus_per_node: int | None
    """Null on a CPU, where any number of processes fits a node."""
    nvlink_domain_nodes: int
    """Nodes whose GPUs NVLink connects."""
    variables: tuple[JobVariable, ...]


class Fabric(Record):
    """A network between nodes: what NCCL needs to be told to use it, and it alone."""

    fabric: str
    title: str
    variables: dict[str, str] = Field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Variables that only the site knows the value of."""
    profile: str | None = None
    """A file on the nodes that sets more of them; the batch script sources it."""
    source: str
    notes: tuple[str, ...] = ()
