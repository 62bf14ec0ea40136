# SPDX-License-Identifier: Apache-2.0
"""Typed, frozen records of the catalogue."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmb.base.record import Record as Record
from llmb.catalogue.published import (
    Checkpoint,
    Document,
    DocumentProfile,
    Expectation,
    Number,
    PublishedCondition,
    PublishedFlops,
)
from llmb.catalogue.published import Positive as Positive

DEFAULT = "default"
MIG = " MIG"
"""The part of a device name that marks a MIG slice of a GPU."""
OPEN_CHOICES = {"gpu_type": "GPU type", "scale": "scale", "dtype": "dtype", "release": "release"}
"""Optional fields of a request, and their names in messages."""

MOST_OTHERS = 5
"""Maximum number of alternatives to list."""


@dataclass(frozen=True, slots=True)
class Unspecified:
    """The default of a field that a request leaves unspecified: the value, its source, and the alternatives."""

    name: str
    value: str
    origin: str = DEFAULT
    others: tuple[str, ...] = ()

    def text(self) -> str:
        origin = [] if self.origin == DEFAULT else [self.origin]
        shown = [*self.others[:MOST_OTHERS], *["..."] * (len(self.others) > MOST_OTHERS)]
        others = [f"or {', '.join(shown)}"] if shown else []
        more = "; ".join([*origin, *others])
        return f"{self.name} {self.value}" + (f" ({more})" if more else "")


def unspecified_text(choices: Sequence[Unspecified]) -> str:
    """Return the defaults and their alternatives in one line."""
    return f"not specified: {'; '.join(choice.text() for choice in choices)}"


Size = Annotated[int, Field(ge=1, le=1 << 53), Number]
"""A count, small enough for a float to hold exactly."""
Count = Annotated[int, Field(ge=0, le=1 << 53), Number]


class Dtype(StrEnum):
    """Compute precision of a run."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    """FP8 with a scale for every 32 values (OCP Microscaling)."""
    NVFP4 = "nvfp4"


ENGINE_DTYPES = (Dtype.FP32, Dtype.BF16, Dtype.FP8)
"""Dtypes in which llmb's engine computes; recipes in other dtypes are for other programs."""

GradReduceDtype = Literal["fp32", "bf16"]


class Convention(StrEnum):
    """Ways of counting the model FLOPs of one sequence (see docs/explanation/flops-and-mfu.md)."""

    PUBLISHED = "published"
    FULL = "full"
    CAUSAL = "causal"
    PACKED = "packed"


LoraTargets = Literal["qkv", "qkv-split", "qv", "attention", "all-linear"]
"""Layers with adapters (see ``ADAPTED``); ``qkv``: one A for the fused projection; ``qkv-split``: one A for each."""
QKV = ("q_proj", "k_proj", "v_proj")
ATTENTION = (*QKV, "o_proj")
ADAPTED: dict[LoraTargets, tuple[str, ...]] = {
    "qkv": QKV,
    "qkv-split": QKV,
    "qv": ("q_proj", "v_proj"),
    "attention": ATTENTION,
    "all-linear": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
}
"""Layers of a block that have an adapter; ``gate_proj`` only if the feed-forward layer has a gate."""


SOURCED = (
    *("peak_tflops", "memory_gb", "memory_bandwidth_tb_s", "nvlink_gb_s", "network_gb_s", "tdp_w", "sms"),
    "relative_efficiency",
)
"""Figures of a GPU type that need a source."""


class Gpu(Record):
    """One GPU type. Peaks are dense; bandwidths are per GPU; ``nvlink_gb_s`` is the sum of both directions."""

    gpu_type: str
    name: str
    vendor: Literal["nvidia", "amd"] = "nvidia"
    peak_tflops: dict[str, Annotated[float, Field(ge=1, lt=2e5), Number]]
    memory_gb: Annotated[float, Number] = Field(ge=1, lt=1e4)
    memory_bandwidth_tb_s: Annotated[float, Number] = Field(gt=0, lt=1e3)
    nvlink_gb_s: Annotated[float, Number] = Field(ge=1, lt=1e5)
    nvlink_domain_gpus: int = Field(gt=0)
    network_gb_s: float | None = Field(default=None, gt=0, lt=400)
    tdp_w: float | None = Field(default=None, gt=0)
    sms: int | None = Field(default=None, gt=0)
    """Number of streaming multiprocessors; if None, predictions assume an H100's number."""
    gpus_per_node: int = Field(gt=0)
    relative_efficiency: float | None = Field(default=None, gt=0, lt=2)
    """The efficiency of computation and memory relative to an H100's; None, which means 1, if it was not fitted."""
    device_names: tuple[str, ...]
    """Glob patterns that match the driver's device names of exactly this variant."""
    borrows: tuple[str, ...] = ()
    """GPU types whose published layouts this type uses if a workload has none for it, the closest first."""
    is_foreign: bool = False
    """True if a file of ``--hardware`` or the user's catalogue describes the type: no published step confirms it."""
    nvlink_c2c: bool = False
    """True if NVLink also connects the GPU to its host's CPU."""
    sources: dict[str, str]
    notes: tuple[str, ...] = ()

    def is_called(self, name: str) -> bool:
        """Return whether ``name`` is a device name of exactly this variant; a MIG slice is a different device."""
        return MIG not in name and any(fnmatchcase(name, pattern) for pattern in self.device_names)

    @model_validator(mode="after")
    def _every_figure_has_a_source(self) -> Self:
        missing = [name for name in SOURCED if getattr(self, name) is not None and name not in self.sources]
        if missing:
            raise ValueError(f"{self.gpu_type} has no source for {', '.join(missing)}")
        return self


def gpu_type_of(name: str, gpus: Iterable[Gpu]) -> str | None:
    """Return the GPU type of a device name; None for an unknown variant, for which no peak is assumed."""
    return next((gpu.gpu_type for gpu in gpus if gpu.is_called(name)), None)


class Fabric(Record):
    """A network between nodes, with the variables that make NCCL use this network only."""

    fabric: str
    title: str
    variables: dict[str, str] = Field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Variables that each site must set."""
    profile: str | None = None
    """A file on the nodes that sets more variables; the batch script sources it."""
    source: str
    notes: tuple[str, ...] = ()


class RopeScaling(Record):
    """Llama 3.1's frequency scaling of rotary embeddings."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position: Size


Router = Literal[
    "sigmoid-scaled-inputs", "softmax-weighted-outputs", "sigmoid-weighted-outputs", "softmax-before-choice"
]
"""The scores of chosen experts and their use, as in Llama 4, Mixtral, DeepSeek-V3 and DeepSeek-V2, respectively."""


class MixtureOfExperts(Record):
    """Expert layers: the last of every ``interleave`` layers, unless other parts of the model exclude it."""

    router: Router
    experts: Size
    top_k: Size
    ffn_hidden_size: Size
    shared_ffn_hidden_size: Size | None = None
    """FFN size of the shared expert, which processes every token; None if there is none."""
    interleave: Size

    @model_validator(mode="after")
    def _a_token_has_as_many_experts(self) -> Self:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k is {self.top_k}; it must be from 1 to the number of experts, {self.experts}")
        return self


class ChunkedAttention(Record):
    """Chunked attention; each ``global_every``-th layer has full attention without rotary embedding, and a
    position-dependent temperature (Llama 4)."""

    chunk_size: Size
    global_every: Size
    floor_scale: float
    attn_scale: float


class LatentAttention(Record):
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values are projected from latent vectors."""

    query_rank: Count
    """0 if queries are projected from the hidden state."""
    key_value_rank: Size
    nope_head_dim: Size
    """Elements of a query or key head without rotary embedding; ``head_dim`` counts these and the rotated ones."""
    value_head_dim: Size

    @property
    def key_value_dim(self) -> int:
        """Return the number of elements of a key and value head that are projected from a latent vector."""
        return self.nope_head_dim + self.value_head_dim


class SlidingWindow(Record):
    """Attention to the last ``tokens`` tokens, in the first of every ``every`` layers; other layers attend to all."""

    tokens: Size
    every: Size


class RouterGroups(Record):
    """Selection of experts within the best groups, by scores plus a bias that only affects selection (DeepSeek-V3)."""

    groups: Size
    top_groups: Size
    scaling_factor: Positive


class Yarn(Record):
    """YaRN's scaling of rotary frequencies."""

    factor: Positive
    original_max_position: Size
    beta_fast: Positive
    beta_slow: Positive
    mscale: Positive = 1.0
    """Factor of the logarithm of ``factor`` in the scaling of attention scores."""


class HybridLayers(Record):
    """Layers of one kind each, in the order of ``pattern``: ``M`` is Mamba-2, ``*`` attention, ``E`` experts."""

    pattern: str = Field(pattern=r"^[M*E]+$")
    heads: Size
    head_dim: Size
    state_dim: Size
    groups: Size
    conv_kernel: Size = 4

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Return the number of elements of a token that the convolution of a Mamba layer processes."""
        return self.inner_size + 2 * self.groups * self.state_dim

    def matrices(self, hidden_size: int) -> int:
        """Return the number of elements of the two matrices of a Mamba layer."""
        return hidden_size * (self.inner_size + self.convolved + self.heads) + self.inner_size * hidden_size

    def parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of a Mamba layer, including convolution, norm and three numbers per head."""
        return self.matrices(hidden_size) + self.convolved * (self.conv_kernel + 1) + self.inner_size + 3 * self.heads


class OtherParts(Record):
    """Parts of a model that llmb's engine does not implement."""

    attention_sinks: bool = False
    """Each head has a learned logit that is included in the softmax, but has no key or value."""
    sliding_window: SlidingWindow | None = None
    latent_attention: LatentAttention | None = None
    router_groups: RouterGroups | None = None
    dense_layers: Count = 0
    """Number of first layers that have no experts."""
    expert_biases: bool = False
    """The router and all matrices of an expert have biases."""
    clamped_glu: bool = False
    """The gate and the values that it scales are clamped, and one is added to these values (gpt-oss)."""
    multi_token_layers: Count = 0
    """Layers that predict further tokens, each with the head; the number of parameters excludes them."""
    yarn: Yarn | None = None
    hybrid_layers: HybridLayers | None = None
    latent_experts: Count = 0
    """Size of the vectors that routed experts compute with, projected from and to the hidden size (Nemotron 3)."""

    @property
    def names(self) -> tuple[str, ...]:
        names = (name.replace("_", " ") for name in type(self).model_fields if getattr(self, name))
        spelled = {"dense layers": "first layers without experts", "clamped glu": "clamped GLU", "yarn": "YaRN"}
        return tuple(spelled.get(name, name) for name in names)


Norm = Literal["rmsnorm", "layernorm1p"]
"""``layernorm1p`` stores its weight minus one, and has a bias."""
Mlp = Literal["swiglu", "squared-relu"]
"""Feed-forward layers, including experts: gated SiLU with three matrices, or squared ReLU with two."""
RotaryPairs = Literal["halves", "interleaved"]
"""Elements of a head that are rotated together: i and i + half, or 2i and 2i + 1."""


class Model(Record):
    """The architecture of one model, by its parts."""

    model: str
    size: str
    norm: Norm
    mlp: Mlp
    rotary_pairs: RotaryPairs = "halves"
    qk_norm: Literal["rmsnorm"] | None = None
    """Norm of each query and key head before the rotary embedding; None if there is none."""
    qkv_bias: bool = False
    """True if query, key and value have biases."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    """True if every matrix of dense feed-forward layers has a bias."""
    tied_embeddings: bool = False
    """True if the embedding and the head share one matrix."""
    layers: Size
    hidden_size: Size
    ffn_hidden_size: Size
    attention_heads: Size
    kv_heads: Size
    head_dim: Size
    vocab_size: Size
    max_seq_len: Size
    norm_eps: Positive
    rope_theta: Positive
    rotary_fraction: Positive = 1.0
    rope_scaling: RopeScaling | None = None
    init_std: Positive
    moe: MixtureOfExperts | None = None
    chunked_attention: ChunkedAttention | None = None
    """None if attention is not split into chunks."""
    other_parts: OtherParts | None = None
    """None for a model that llmb's engine can train."""
    source: str

    @model_validator(mode="after")
    def _experts_are_gated(self) -> Self:
        if self.moe is not None and self.mlp != "swiglu" and not self.hybrid_layers:
            raise ValueError(f"experts need mlp swiglu, not {self.mlp}")
        if self.moe is not None and self.mlp_bias:
            raise ValueError("a model with experts cannot have mlp_bias")
        return self

    @property
    def other_names(self) -> tuple[str, ...]:
        """Return the names of the model's parts that llmb's engine lacks."""
        return self.other_parts.names if self.other_parts else ()

    @property
    def latent_attention(self) -> LatentAttention | None:
        return self.other_parts.latent_attention if self.other_parts else None

    @property
    def hybrid_layers(self) -> HybridLayers | None:
        return self.other_parts.hybrid_layers if self.other_parts else None

    def kind_of(self, layer: int) -> str:
        """Return a layer's letter in the pattern of hybrid layers; without them, ``*E``: attention and feed-forward."""
        return self.hybrid_layers.pattern[layer] if self.hybrid_layers else "*E"

    @property
    def multi_token_layers(self) -> int:
        return self.other_parts.multi_token_layers if self.other_parts else 0

    def is_moe_layer(self, layer: int) -> bool:
        if self.moe is None or (self.other_parts and layer < self.other_parts.dense_layers):
            return False
        if "E" not in self.kind_of(layer):
            return False
        return layer % self.moe.interleave == self.moe.interleave - 1

    def is_global_layer(self, layer: int) -> bool:
        """Return True for a layer with full causal attention."""
        if self.other_parts and (window := self.other_parts.sliding_window):
            return layer % window.every != 0
        return self.chunked_attention is None or (layer + 1) % self.chunked_attention.global_every == 0


class ParallelSizes(Record):
    """The number of ranks in each dimension of parallelism; ``vp`` is the number of virtual stages per rank."""

    tp: Size = 1
    pp: Size = 1
    vp: Size = 1
    cp: Size = 1
    ep: Size = 1
    etp: Size = 1


PARALLEL = tuple(ParallelSizes.model_fields)
"""The names of the sizes, in display order."""


class Layout(ParallelSizes):
    """Parallel sizes and batch sizes of a run."""

    gpus: Size
    mbs: Size
    gbs: Size
    seq_len: Size
    layers: Size
    counts_embedding_and_loss: bool = False
    """True if the embedding and the loss count as layers in the pipeline split, unless an end stage is set."""
    first_stage_layers: Count | None = None
    """Number of layers of the first of the PP x VP stages; None if it is not set."""
    last_stage_layers: Count | None = None
    """Number of layers of the last stage; None if it is not set."""
    sequence_parallel: bool = True
    """True if each TP rank holds only a part of the sequence between tensor parallel layers."""

    @property
    def sequence_shards(self) -> int:
        """Number of parts of a sequence between tensor parallel layers."""
        return self.tp if self.sequence_parallel else 1

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Expert-data-parallel size: the number of replicas of the routed experts."""
        return self.gpus // (self.etp * self.ep * self.pp)

    @property
    def ga(self) -> int:
        """Number of micro-batches per step and data-parallel rank."""
        return self.gbs // (self.mbs * self.dp)

    @property
    def pipeline_layers(self) -> int:
        """Number of layers that the pipeline split counts."""
        counted = self.counts_embedding_and_loss and self.pp > 1 and not self.has_custom_split
        return self.layers + (2 if counted else 0)

    @property
    def has_custom_split(self) -> bool:
        """True if the layout sets the number of layers of the first or the last stage."""
        return self.first_stage_layers is not None or self.last_stage_layers is not None


DocumentLengths = Literal["uniform", "squad"]
"""The distribution of the lengths of synthetic documents: uniform, or like SQuAD's."""


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
    """Dtype of gradient accumulation and reduction; a run that computes in fp32 uses fp32."""
    data: Literal["uniform", "zipf"]
    """Synthetic tokens: uniform as in the reference suite, or Zipf-distributed, which a model can learn."""
    document_tokens: int | None = None
    """Mean tokens of packed documents, or 0 for one document per sequence; None if not specified."""
    document_lengths: DocumentLengths = "uniform"


class Packing(Record):
    """Statistics of one packed sequence: its tokens, and the sum of the squared lengths of its documents."""

    tokens: Positive
    sum_of_squares: Positive
    chunked_sum_of_squares: Positive | None = None
    """The sum for documents split at the model's attention chunks; None if no document is split."""
    source: str


class Window(Record):
    """The steps of the statistics, numbered from 0, both ends included, and the rule that selected them."""

    first: Count
    last: Count
    rule: str

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last

    @property
    def size(self) -> int:
        return self.last - self.first + 1


class Lora(Record):
    """Low-rank adapters: y = W x + alpha / rank * B A dropout(x) (Hu et al., 2021)."""

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    dropout: float = Field(ge=0, lt=1)
    targets: LoraTargets

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def fused(self) -> bool:
        """Return whether query, key and value share one A, as in the adapter of a fused projection."""
        return self.targets == "qkv"


class ConfigFile(Record):
    """A Hugging Face configuration from which a model was read. ``programs`` train its type if llmb's engine cannot."""

    path: str
    sha256: str
    model_type: str
    programs: str | None = None

    @property
    def text(self) -> str:
        return f"no figures are published for the {self.model_type} model in {self.path} (sha256 {self.sha256[:12]})"


class Recipe(Record):
    """A fully resolved recipe: workload x size x dtype x GPU type x scale."""

    workload: str
    size: str
    dtype: Dtype
    gpu_type: str
    scale: Size
    release: str | None
    document: Document | None
    """The document with the layout or with the layout from which it is derived; None if there is none."""
    task: Literal["pretrain", "lora", "sft"]
    proxy: bool
    model: Model
    layout: Layout
    training: Training
    lora: Lora | None = None
    """The adapters that the recipe trains; None if it trains all weights."""
    capacity_factor: Positive | None = None
    """Rows of each routed expert relative to an equal share of tokens x top-k; None if no token is dropped."""
    packing: Packing | None
    published_flops: PublishedFlops | None
    expectations: tuple[Expectation, ...]
    expectations_reason: str | None
    """The reason if there is no expectation."""
    conditions: tuple[PublishedCondition, ...] = ()
    """Conditions of the published run that may differ in a run here."""
    checkpoint: Checkpoint | None
    peak_tflops: Positive | None
    notes: tuple[str, ...]
    full_layers: Size
    """Number of layers of the full model."""
    gpu_memory_gb: Positive | None = None
    """Memory of one GPU, in 10^9 bytes; None on a CPU or an unknown GPU."""
    unspecified: tuple[Unspecified, ...] = ()
    overridden: tuple[str, ...] = ()
    """Fields of ``layout`` that options changed."""
    decisions: tuple[str, ...] = ()
    """The differences from the published recipe."""
    pretended_rank: Count | None = None
    """The rank that runs alone, as if the other ranks existed; None for a run of all ranks."""
    config_file: ConfigFile | None = None
    """The file that describes the model; None for a model of the catalogue."""

    @property
    def model_name(self) -> str:
        """The workload and the size, and a mark for a proxy or for one rank alone."""
        return " ".join(filter(None, (self.workload, self.size, self.stand_in)))

    @property
    def stand_in(self) -> str:
        """Return the mark of a proxy, or of a rank that runs alone; empty for a full run."""
        return " ".join(filter(None, (self.proxy_text, self.pretended_text)))

    @property
    def pretended_text(self) -> str:
        """The mark of a rank that runs alone; empty for a run of all ranks."""
        return "" if self.pretended_rank is None else f"PRETEND (rank {self.pretended_rank} of {self.scale} alone)"

    @property
    def proxy_text(self) -> str:
        """The mark of a proxy; empty for the full model."""
        return f"PROXY ({self.layout.layers} of {self.full_layers} layers)" if self.proxy else ""

    @property
    def engine_problem(self) -> str | None:
        """Describe what llmb's engine lacks for the recipe, and which programs may train it; None if nothing."""
        own = () if self.dtype in ENGINE_DTYPES else (self.dtype.value,)
        lacks = (*own, *self.model.other_names)
        ours = "Megatron-Bridge or torchtitan may support this recipe ('--framework megatron_bridge' or 'torchtitan')"
        programs = f"{ours}, and llmb judges logs from other programs"
        if file := self.config_file:
            programs = f"{file.programs or 'no program that llmb starts'} can train models of type {file.model_type}"
        return f"llmb's engine lacks {', '.join(lacks)}: {programs}" if lacks else None

    @property
    def prediction_problem(self) -> str | None:
        """Describe why no step of the recipe is predicted; None if steps can be."""
        return f"{self.model_name} has hybrid layers, which are not predicted" if self.model.hybrid_layers else None

    @property
    def shares_parameters(self) -> bool:
        """True if several ranks hold replicas of parameters that data parallelism can shard."""
        return self.layout.dp * self.layout.cp > 1 or (self.model.moe is not None and self.layout.edp > 1)

    @property
    def figure(self) -> Expectation | None:
        """Return the published figure that runs are compared with, if any: from a table or, without one, an example."""
        return next(iter(self.expectations), None)

    def title(self, dtype: str | None = None) -> str:
        """Return the title of the recipe; ``dtype`` is a more detailed description of the precision, if any."""
        return f"{self.model_name} {dtype or self.dtype} on {self.scale} x {self.gpu_type}"

    def published_way(self, key: str) -> str | None:
        """Return the published value of a condition of training; None if unknown."""
        return next((condition.value for condition in self.conditions if condition.key == key), None)

    @property
    def documented_profile(self) -> DocumentProfile | None:
        return self.document.profile if self.document else None

    @property
    def documented_window(self) -> str | None:
        """The steps behind the figures of the recipe's document, such as ``35-44`` or ``last``; None if not stated."""
        return self.document.window if self.document else None
