# SPDX-License-Identifier: Apache-2.0
"""The document that ``--json`` prints. A unit ``u`` is one pass over a hidden state in bf16."""

from typing import Literal

from llmb.catalogue.records import Dtype, Record

Direction = Literal["forward", "backward"]
Layers = Literal["dense", "experts"]
MODELS = ("8b", "15b", "70b", "405b", "340b", "maverick")
"""Those of the comparison."""
TINY_MODELS = ("tiny-llama3.1", "tiny-nemotron4", "tiny-maverick")
"""Of the same parts, for tests."""


class Kernel(Record):
    """One launch. ours: a kernel that the engine brings along, which is not generated.

    cached_u: what its programs read again in a later loop, from the L2 cache. in_flight_mb: bytes of those rows in all
    programs that run at a time. Beyond the size of the cache, what is read again is part of ``u``.
    """

    name: str
    u: float
    cached_u: float = 0.0
    in_flight_mb: float = 0.0
    ours: bool = False
    uncoalesced_stores: int = 0
    uncoalesced_loads: int = 0


class Pass(Record):
    """A pass of one layer, on average. Products and attention are apart: they are not counted in ``u``.

    in_flight_mb: of the kernel that has most.
    """

    u: float
    cached_u: float = 0.0
    in_flight_mb: float = 0.0
    kernels: float
    products: float
    attentions: float
    uncoalesced_stores: float
    uncoalesced_loads: float
    list: tuple[Kernel, ...]


class Block(Record):
    """layers: of a model whose layers do not all have experts, which of them. routed_u: what routed experts read and
    write themselves, of rows that are already in the order of experts."""

    layers: Layers
    forward: Pass
    backward: Pass
    routed_u: float = 0.0

    @property
    def u(self) -> float:
        return self.forward.u + self.backward.u

    def total(self, field: str) -> float:
        return float(getattr(self.forward, field) + getattr(self.backward, field))


class Memory(Record):
    """Of a proxy, computed: what PyTorch has allocated at the peak, by what allocated it."""

    gpu_type: str
    layers: int
    parameters: int
    peak_gb: float
    by_gb: dict[str, float]


class Case(Record):
    """bytes_per_parameter: what a step reads and writes once, by function: norm, update, casts, copies of FSDP.

    accumulation_bytes_per_parameter: likewise of each further micro-batch. uncoalesced_copies: of a layer's weights,
    per step and outside of compiled code.
    """

    model: str
    dtype: Dtype
    hidden_state_bytes: int
    blocks: tuple[Block, ...]
    bytes_per_parameter: float
    bytes_per_parameter_by: dict[str, float]
    accumulation_bytes_per_parameter: float
    uncoalesced_copies: float
    memory: Memory

    def block(self, layers: Layers) -> Block | None:
        return next((block for block in self.blocks if block.layers == layers), None)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.memory.gpu_type, self.model, self.dtype.value


class Document(Record):
    torch: str
    triton: str
    cases: tuple[Case, ...]

    def find(self, case: Case) -> Case | None:
        return next((other for other in self.cases if other.key == case.key), None)
