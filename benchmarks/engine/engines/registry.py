# SPDX-License-Identifier: Apache-2.0
"""The engines, what each can train, and whether it is installed here."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version

from benchmarks.engine.wheels import importable
from llmb import __version__
from llmb.catalogue.records import Dtype, Model
from llmb.runs.huggingface.tensors import Parts, part_differences

LLMB = "llmb"
WITHOUT_BIASES: Parts = dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), False)
DENSE: Parts = {"moe": None, "chunked_attention": None, "qk_norm": None, "tied_embeddings": False, **WITHOUT_BIASES}
LLAMA: Parts = {**DENSE, "norm": "rmsnorm", "mlp": "swiglu", "rotary_pairs": "halves", "rotary_fraction": 1.0}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that an engine keeps: of weights with gradients, moments and copies, and of each logit of a micro-batch."""

    bytes_per_parameter: float
    bytes_per_logit: float
    more_in_fp8: float = 0.0
    """Per parameter, of weights cast to FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """``modules`` have to be importable, ``fp8_modules`` too for FP8; ``install`` is the command to install them."""

    program: str | None
    """Module that trains a job; None for llmb, which is run by its own command."""
    distribution: str
    modules: tuple[str, ...]
    install: str
    parts: Parts = field(default_factory=dict)
    """What its adapter can build; without any, all models."""
    fp8_modules: tuple[str, ...] = ()
    needs_gpu: bool = False
    memory: Memory


FP32_MASTERS = Memory(bytes_per_parameter=18, bytes_per_logit=12, more_in_fp8=1)
"""fp32 weights, gradients and moments, and the bf16 weights that autocast makes."""
HUGGING_FACE = Engine(
    program="benchmarks.engine.engines.huggingface",
    distribution="transformers",
    modules=("transformers",),
    install="pip install transformers",
    fp8_modules=("torchao.float8",),
    memory=Memory(bytes_per_parameter=8, bytes_per_logit=12, more_in_fp8=1),
)
ENGINES: dict[str, Engine] = {
    LLMB: Engine(
        program=None,
        distribution="llmb",
        modules=("torch",),
        install="install torch 2.11 or newer",
        memory=Memory(bytes_per_parameter=16, bytes_per_logit=4, more_in_fp8=2),
    ),
    "huggingface": HUGGING_FACE,
    "huggingface-fp32": replace(HUGGING_FACE, memory=FP32_MASTERS),
    "huggingface-whole": HUGGING_FACE,
    "torchtitan": Engine(
        program="benchmarks.engine.engines.torchtitan",
        distribution="torchtitan",
        modules=("torchtitan", "torchdata", "datasets", "tyro"),
        install="pip install torchtitan==0.2.2",
        parts=LLAMA,
        fp8_modules=("torchao.float8",),
        memory=FP32_MASTERS,
    ),
    "megatron-core": Engine(
        program="benchmarks.engine.engines.megatron",
        distribution="megatron-core",
        modules=("megatron.core", "transformer_engine.pytorch"),
        install='pip install "megatron-core[dev]"',
        parts=DENSE,
        needs_gpu=True,
        memory=Memory(bytes_per_parameter=18, bytes_per_logit=8, more_in_fp8=2),
    ),
}
DEFAULT_ENGINES = (LLMB, "huggingface", "huggingface-fp32", "torchtitan", "megatron-core")


def obstacle(name: str, model: Model, dtype: Dtype, *, has_gpu: bool) -> str | None:
    """Why an engine cannot train this model here, or None if nothing is known to prevent it."""
    engine = ENGINES[name]
    if missing := _missing(engine.modules):
        return f"not installed: {missing} ({engine.install})"
    if difference := next(part_differences(model, engine.parts), None):
        return f"the adapter of {name} cannot build this model: {difference}"
    if dtype is Dtype.FP8 and (missing := _missing(engine.fp8_modules)):
        return f"not installed: {missing}, which {name} needs for fp8 (pip install torchao)"
    if engine.needs_gpu and not has_gpu:
        return f"{name} needs a GPU"
    return None


def _missing(modules: Iterable[str]) -> str | None:
    return next((name for name in modules if not importable(name)), None)


def engine_version(name: str) -> str | None:
    if name == LLMB:
        return __version__
    try:
        return version(ENGINES[name].distribution)
    except PackageNotFoundError:
        return None
