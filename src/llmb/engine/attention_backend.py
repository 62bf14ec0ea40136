# SPDX-License-Identifier: Apache-2.0
"""Chooses the attention backend of a run by trying the device's backends with the model's own attention and shapes."""

import math
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from llmb.catalogue.layout_check import rank_model
from llmb.engine.data.batches import moved
from llmb.engine.data.build import build_data
from llmb.engine.device import Moment, synchronize
from llmb.engine.model.attention import (
    CausalAttention,
    Documents,
    Reach,
    attend,
    between,
    document_masks,
    document_segments,
)
from llmb.engine.model.decoder import Decoder
from llmb.engine.parallel.context_parallel import rank_positions, rank_ranges
from llmb.engine.parallel.data_parallel import compute_dtype
from llmb.engine.parallel.mesh import Ranks, of_every_rank
from llmb.runs.attention_choice import AttentionBackend, AttentionReport, Trial, problem_text, select, try_backends
from llmb.runs.plan import EnginePlan

KERNELS: Mapping[AttentionBackend, SDPBackend] = MappingProxyType(
    {
        "varlen": SDPBackend.FLASH_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "flash3": SDPBackend.FLASH_ATTENTION,
        "flash4": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
)
PACKAGES: Mapping[AttentionBackend, str] = MappingProxyType({"flash3": "FA3", "flash4": "FA4"})
"""Torch's names for the backends that need a separate package."""
RESULTS = ("result", "gradient of queries", "gradient of keys", "gradient of values")
BOUNDS = {torch.bfloat16: 0.02, torch.float32: 0.001}
"""The largest tolerated distance from exact results, relative to their norm; rounding to bf16 causes about 0.003."""
MOST_SCORES = 2**26
"""Maximum number of scores at a time, 256 MiB in fp32, unless one query of every head has more."""
WARM_UPS, TIMED = 3, 10
FAILURES = (RuntimeError, TypeError, ValueError, ImportError)
"""The errors that torch raises for inputs that a backend does not support, or if a backend is missing."""


class BackendTrial(NamedTuple):
    """The result of a trial."""

    milliseconds: float | None
    """Time of all layers of this rank, or of a benchmark's call; None if not timed."""
    distance: float | None
    """Largest relative distance of a result or gradient from the exact one; None if not compared."""
    wrong: str | None
    """The problem of an inaccurate result or gradient; None if there is none or none was compared."""


@contextmanager
def attention_kernel(backend: AttentionBackend) -> Iterator[None]:
    """Compute attention in this context with ``backend`` or raise one of ``FAILURES``. torch's cache would ignore
    the backend without ``cache_key_tag``."""
    tag = f"{torch.compiler.config.cache_key_tag}attention={backend}"
    with (
        separate_flash_attention(backend) if backend in PACKAGES else nullcontext(),
        sdpa_kernel(KERNELS[backend]),
        torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
    ):
        yield


@contextmanager
def separate_flash_attention(backend: AttentionBackend) -> Iterator[None]:
    """Use the FlashAttention of a separate package as torch's own in this context, or raise one of ``FAILURES``."""
    if backend == "flash4":
        hook = import_module("torch.nn.attention._fa4").register_flash_attention_fa4  # not in every torch
        register = partial(hook, "llmb.engine.kernels.flash_attention_4")
        nn.attention.register_flash_attention_impl(PACKAGES[backend], register_fn=register)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that kernels are replaced
        nn.attention.activate_flash_attention_impl(PACKAGES[backend])
    try:
        yield
    finally:
        nn.attention.restore_flash_attention_impl()


def choose_attention(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks) -> AttentionReport:
    """Set up ``stages`` for the backend that ``select`` returns; raise UsageError if none works. A collective."""
    cores = attention_cores(stages)
    attempted = partial(attempt, cores, plan, ranks)
    packed = first_documents(plan) is not None
    trials = try_backends(
        plan.attention_backend, plan.device, attempted, packed=packed, deterministic=plan.deterministic
    )
    forget_memory(ranks.device)
    report = select(plan.attention_backend, trials)
    for core in cores:
        core.backend, core.repeats_heads = report.backend, report.repeats_heads
        core.in_fp32 = ranks.device.type == "cpu"  # whose backward pass takes four times as long in bf16
    return report


def attention_cores(stages: Sequence[Decoder]) -> list[CausalAttention]:
    return [module for stage in stages for module in stage.modules() if isinstance(module, CausalAttention)]


def attempt(
    cores: Sequence[CausalAttention], plan: EnginePlan, ranks: Ranks, backend: AttentionBackend, timed: bool
) -> list[Trial]:
    """Try ``backend`` on the model's own attention; return the trials, which are equal on all ranks. A collective."""
    if backend == "varlen" and (problem := varlen_problem(plan)):
        return [Trial(backend=backend, problem=problem)]
    measure = partial(try_layers, cores, plan, ranks, backend, timed=timed and ranks.is_first)
    if backend == "varlen" and plan.device == "cuda" and not groups_heads_of_documents():
        return [try_heads(backend, measure, ranks, repeats_heads=True)]
    model = plan.recipe.model
    return try_kernel(backend, measure, ranks, grouped=model.attention_heads != model.kv_heads, timed=timed)


def try_layers(
    cores: Sequence[CausalAttention],
    plan: EnginePlan,
    ranks: Ranks,
    backend: AttentionBackend,
    repeats_heads: bool,
    *,
    timed: bool,
) -> BackendTrial:
    """Compare a layer of each reach with exact attention, unless ``math``; if ``timed``, sum all layers' times."""
    kinds = {core.reach: core for core in cores}
    layers = Counter(core.reach for core in cores)
    milliseconds, distances = 0.0, list[float]()
    for kind, core in kinds.items():
        core.backend, core.repeats_heads = backend, repeats_heads
        heads, documents = query_key_value(plan, ranks), documents_of(plan, ranks, varlen=backend == "varlen")
        generator = torch.Generator(ranks.device).manual_seed(plan.seed + 1)
        gradient = torch.empty_like(heads[0], requires_grad=False).normal_(generator=generator)
        once = partial(forward_and_backward, core, heads, gradient, documents)
        with attention_kernel(backend):
            results = once()
            if backend != "math":
                exact = exact_attention(heads, gradient, *key_range(plan, ranks, kind))
                distances += distances_of(results, exact)
                if wrong := accuracy_problem(distances[-len(RESULTS) :], BOUNDS[results[0].dtype]):
                    return BackendTrial(None, max(distances), wrong)
                del exact
            milliseconds += layers[kind] * (pass_milliseconds(once, ranks.device) if timed else 0.0)
    synchronize(ranks.device)
    return BackendTrial(milliseconds if timed else None, max(distances, default=None), None)


Measure = Callable[[bool], BackendTrial]
"""Runs a trial of attention, with repeated heads if the argument is True."""


def try_kernel(
    backend: AttentionBackend, measure: Measure, ranks: Ranks | None, *, grouped: bool, timed: bool
) -> list[Trial]:
    """Try ``backend``. If ``grouped``, add a trial with repeated heads if ``timed``, or replace a failure with it."""
    trial = try_heads(backend, measure, ranks, repeats_heads=False)
    if not grouped or (trial.problem is None and not timed):
        return [trial]
    repeated = try_heads(backend, measure, ranks, repeats_heads=True)
    return [trial, repeated] if trial.problem is None else [repeated]


def try_heads(backend: AttentionBackend, measure: Measure, ranks: Ranks | None, *, repeats_heads: bool) -> Trial:
    """Try ``backend``; return the result of all ranks (a collective) or, without ``ranks``, of this process."""
    own, refusal = BackendTrial(None, None, None), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            own = measure(repeats_heads)
        except torch.AcceleratorError:  # after which the device computes nothing in this process
            raise
        except FAILURES as error:
            refusal = problem_text(str(error), [str(warning.message) for warning in caught])
    trials = of_every_rank((own, refusal), ranks) if ranks else [(own, refusal)]
    problems = [
        (one.wrong is not None, f"on rank {rank}, {problem}" if rank else problem)
        for rank, (one, refusal) in enumerate(trials)
        if (problem := one.wrong or refusal)
    ]
    if not problems:
        first, _ = trials[0]
        distance = max((one.distance for one, _ in trials if one.distance is not None), default=None)
        return Trial(backend=backend, repeats_heads=repeats_heads, milliseconds=first.milliseconds, distance=distance)
    wrong, problem = problems[0]
    if wrong and ranks and ranks.is_first:
        sys.stdout.write(f"llmb: attention backend {backend} computes wrong results for this run: {problem}\n")
    return Trial(backend=backend, repeats_heads=repeats_heads, problem=problem)


def varlen_problem(plan: EnginePlan) -> str | None:
    """Return why variable-length attention cannot be used; None if it can."""
    if first_documents(plan) is None:
        return "sequences are not packed from documents"
    if plan.device == "cpu" and plan.compiled:
        return "on a CPU, blocks would be compiled for the documents of each step"
    return None


def groups_heads_of_documents() -> bool:
    """Return True if torch's variable-length attention supports fewer key than query heads; torch 2.11's does not."""
    return "enable_gqa" in signature(varlen_attn).parameters


def first_documents(plan: EnginePlan) -> Tensor | None:
    """Return the ``starts`` of the first ``MicroBatch``, [MBS, seq]; None if it is not packed."""
    return build_data(plan).micro_batch(range(plan.recipe.layout.mbs)).starts


def query_key_value(plan: EnginePlan, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Return random query, key and value of one micro-batch, with the shapes that they have in an attention layer."""
    layout, device = plan.recipe.layout, ranks.device
    model = rank_model(plan.recipe.model, layout)
    generator = torch.Generator(device).manual_seed(plan.seed)

    def heads(tokens: int, number: int) -> Tensor:
        shape = (layout.mbs, tokens, number, model.head_dim)
        dtype = compute_dtype(plan.recipe.dtype)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype, requires_grad=True)

    query = heads(layout.seq_len // layout.cp, model.attention_heads)
    return query, heads(layout.seq_len, model.kv_heads), heads(layout.seq_len, model.kv_heads)


def documents_of(plan: EnginePlan, ranks: Ranks, *, varlen: bool) -> Documents | None:
    """Return the first micro-batch's documents as segments if ``varlen``, else as masks; None if it is not packed."""
    layout, device = plan.recipe.layout, ranks.device
    model = rank_model(plan.recipe.model, layout)
    starts = first_documents(plan)
    if starts is None:
        return None
    if varlen:
        ranges = rank_ranges(layout.seq_len, ranks.cp_rank, layout.cp)
        return moved(document_segments(model, starts, ranges, build_data(plan).longest_document()), device)
    places = rank_positions(layout.seq_len, ranks.cp_rank, layout.cp, device)
    return document_masks(model, places, places - starts.to(device)[:, places], layout.seq_len)


def key_range(plan: EnginePlan, ranks: Ranks, reach: Reach) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that each of this rank's queries attends to: [MBS or 1, queries]."""
    layout = plan.recipe.layout
    starts = first_documents(plan)
    places = rank_positions(layout.seq_len, ranks.cp_rank, layout.cp, ranks.device)[None]
    first = torch.zeros_like(places) if starts is None else starts.to(ranks.device)[:, places[0]]
    return reach.first_keys(places, first), places


def forward_and_backward(
    core: nn.Module, heads: tuple[Tensor, Tensor, Tensor], gradient: Tensor, documents: Documents | None
) -> list[Tensor]:
    """Return the result of an attention layer, and the gradients of query, key and value."""
    output = core(*heads, documents)
    return [output.detach(), *torch.autograd.grad(output, heads, gradient)]


def pass_milliseconds(once: Callable[[], object], device: torch.device) -> float:
    """Return the median time of ``once`` in milliseconds, after warm-up calls."""
    for _ in range(WARM_UPS):
        once()
    moments = [Moment(device)]
    for _ in range(TIMED):
        once()
        moments.append(Moment(device))
    synchronize(device)
    return 1e3 * statistics.median(later.seconds_since(earlier) for earlier, later in pairwise(moments))


def forget_memory(device: torch.device) -> None:
    """Free cached GPU memory, and reset the statistics of peak memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def exact_attention(heads: Sequence[Tensor], gradient: Tensor, first_keys: Tensor, last_keys: Tensor) -> list[Tensor]:
    """Return attention and its gradients: [batch, tokens, heads, head_dim] fp32. ``first_keys``, ``last_keys``:
    [batch or 1, queries]."""
    query, key, value, gradient = (part.detach().float() for part in (*heads, gradient))
    batch, queries, number, _ = query.shape
    rows = max(1, MOST_SCORES // (batch * number * key.shape[1]))
    leaves = key.requires_grad_(), value.requires_grad_()
    parts_of_queries: list[tuple[Tensor, ...]] = []
    to_key, to_value = torch.zeros_like(key), torch.zeros_like(value)
    with sdpa_kernel(SDPBackend.MATH):
        for start in range(0, queries, rows):
            own = slice(start, start + rows)
            part = query[:, own].requires_grad_()
            mask = between(first_keys[:, own], last_keys[:, own], key.shape[1])
            output = attend(part, *leaves, mask=mask)
            to_part, *of_keys = torch.autograd.grad(output, (part, *leaves), gradient[:, own])
            parts_of_queries.append((output.detach(), to_part))
            to_key += of_keys[0]
            to_value += of_keys[1]
    result, to_query = (torch.cat(parts, dim=1) for parts in zip(*parts_of_queries, strict=True))
    return [result, to_query, to_key, to_value]


def distances_of(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Return the distance of each result from the exact result, relative to the norm of the exact result."""
    return [float((one.float() - other).norm() / other.norm()) for one, other in zip(results, exact, strict=True)]


def accuracy_problem(distances: Sequence[float], bound: float) -> str | None:
    """Describe the first of ``RESULTS`` that is not finite or too far from exact attention; None if all are
    accurate."""
    for name, distance in zip(RESULTS, distances, strict=True):
        if not math.isfinite(distance):
            return f"its {name} is not finite"
        if distance > bound:
            return f"its {name} differs by {100 * distance:.2g} % from exact attention; the limit is {100 * bound:g} %"
    return None
