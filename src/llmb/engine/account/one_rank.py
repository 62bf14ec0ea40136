# SPDX-License-Identifier: Apache-2.0
"""``python -m llmb.engine.account.one_rank JOB``: counts one rank's memory, FLOPs and messages with fake tensors, on a
CPU."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed._tools.fake_collectives  # registers what collectives do with fake tensors
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmb.catalogue.records import Layout
from llmb.engine.account.graphs import (
    KERNELS,
    NAMESPACES,
    Graph,
    Inner,
    Message,
    collective_of,
    counting_backend,
    flops_of,
    group_names,
    is_collective,
    kind_of,
    name_of,
    shown_group,
)
from llmb.engine.attention_backend import attention_kernel
from llmb.engine.data.batches import Figures, MicroBatch, StepData
from llmb.engine.loop import do_step
from llmb.engine.model.linear import local_tensor
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.alone import lone_rank
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.stages import give_memory, shape_stages
from llmb.runs.plan import EnginePlan
from llmb.runs.rank_account import OWNERS, AccountJob, CollectiveCount, RankAccount


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes in use at one moment: in total and, in ``by``, by owner."""

    bytes: int = 0
    by: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Storage:
    reference: "weakref.ref[torch.UntypedStorage]"
    owner: str
    bytes: int


class LiveBytes:
    """Counts the bytes of storages by the names of their owners; each storage from ``add`` until it is freed."""

    def __init__(self) -> None:
        self.total = 0
        self.peak = Use()
        self.live: Counter[str] = Counter()
        self._known: dict[int, _Storage] = {}

    def knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def add(self, tensor: Tensor, owner: str) -> None:
        """Add the storage of a tensor that is not tracked yet."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._known[key] = _Storage(weakref.ref(storage, partial(self._freed, key)), owner, size)
        self._grow(owner, size)

    def give(self, tensor: Tensor, owner: str) -> None:
        """Change the owner of a tensor's storage, if it is tracked."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry.owner != owner:
            self._grow(entry.owner, -entry.bytes)
            entry.owner = owner
            self._grow(owner, entry.bytes)

    def resize(self, storage: torch.UntypedStorage) -> bool:
        """Update the size of a storage, which FSDP resizes without an operator call; return True if it changed."""
        entry = self._known.get(storage._cdata)
        if entry is None or entry.bytes == storage.nbytes():
            return False
        self._grow(entry.owner, storage.nbytes() - entry.bytes)
        entry.bytes = storage.nbytes()
        return True

    def note_peak(self, more: Mapping[str, int] | None = None) -> None:
        """Record the current use if it is the highest so far; ``more`` has further bytes by owner."""
        total = self.total + sum((more or {}).values())
        if total > self.peak.bytes:
            self.peak = Use(total, {owner: size for owner, size in (self.live + Counter(more)).items() if size})

    def forget_peak(self) -> None:
        self.peak = Use()
        self.note_peak()

    def _grow(self, owner: str, size: int) -> None:
        self.live[owner] += size
        self.total += size

    def _freed(self, key: int, _reference: object) -> None:
        entry = self._known.pop(key)
        self._grow(entry.owner, -entry.bytes)


Owner = Literal["weights", "gradients", "optimizer", "activations", "other"]
PLACES: Sequence[tuple[str, str, Owner]] = (
    ("/fsdp/", "reduce", "gradients"),
    ("/fsdp/", "grad", "gradients"),
    ("/fsdp/", "", "weights"),
    ("engine/optimizer.py", "", "other"),
    ("engine/model/linear.py", "GradientSum.__init__", "gradients"),
    ("engine/stages.py", "_to_fp32", "gradients"),
    ("engine/stages.py", "give_memory", "weights"),
    ("engine/precision/", "keep_weight", "weights"),
    ("engine/account/one_rank.py", "step", "other"),
)
"""Substrings of a path and of a function's name, and the owner of its allocations; the innermost call decides."""
UNCOUNTED = ("_wrap_tensor_autograd",)
"""Operators of ``NAMESPACES`` that neither communicate nor wait."""


class Ledger(TorchDispatchMode):
    """Counts memory, FLOPs and collectives of operators in this context. ``fuses``: functions of ``engine.kernels``
    are one kernel each."""

    def __init__(self, *, fuses: bool, mode: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fuses = fuses
        self.mode = mode
        self.memory = LiveBytes()
        self.flops: Counter[str] = Counter()
        self.collectives: list[Message] = []
        self.started: dict[int, Any] = {}
        """Arguments of pending collectives, which must stay in memory, by the storages of the results."""
        self.parameters: set[nn.Parameter] = set()
        self.gathered: dict[nn.Module, list[Tensor]] = {}
        self.inside = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that compiled code can run under this mode."""
        return True

    def begin(self) -> None:
        """Reset the counts, but keep track of live tensors."""
        self.flops.clear()
        self.collectives.clear()
        self.started.clear()
        self.memory.forget_peak()

    def follow(self, stages: Sequence[nn.Module]) -> None:
        """Set the owner of the stages' parameters now, and of gathered parameters and gradients when they appear."""
        for stage in stages:
            self._follow_parameters(stage)
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.register_forward_pre_hook(self._gathered)

    def _gathered(self, module: nn.Module, _inputs: object) -> None:
        """Track a module's gathered parameters: FSDP frees and reallocates their memory, but keeps the tensors."""
        if module not in self.gathered:
            self._follow_parameters(module)
            sharded = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
            apart = {parameter for part in sharded for parameter in part.parameters()}
            own = [each for each in module.parameters() if each not in apart]
            self.gathered[module] = [local_tensor(each.detach()) for each in own]

    def _follow_parameters(self, module: nn.Module) -> None:
        new = [parameter for parameter in module.parameters() if parameter not in self.parameters]
        self.parameters.update(new)
        for parameter in new:
            self.memory.give(local_tensor(parameter.detach()), "weights")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.memory.give(local_tensor(parameter.grad), "gradients")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's interface)
        if DTensor in types:
            return NotImplemented  # it calls operators on local tensors
        kwargs = kwargs or {}
        if func.namespace == "prim" or self.inside:
            return func(*args, **kwargs)
        self._note_resizes()
        result = self._result(func, args, kwargs)
        if func.namespace in NAMESPACES:
            self._communicates(func, args, kwargs, result)
        else:
            if flops := flops_of(func, args, kwargs, result):
                self.flops[kind_of(func, args)] += flops
        self._allocated(result)
        return result

    def _communicates(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:  # noqa: ANN401 (torch's interface)
        if is_collective(func):
            if isinstance(result, Tensor):
                key = result.untyped_storage()._cdata
                self.started[key] = args
            self.collectives.append(collective_of(func, args, kwargs, result))
        elif name_of(func) == "wait_tensor":
            key = args[0].untyped_storage()._cdata
            self.started.pop(key, None)
        elif name_of(func) not in UNCOUNTED:
            raise NotImplementedError(f"the collective {func} is not counted")

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 (torch's interface)
        if name_of(func) == "wait_tensor" and isinstance(args[0], FakeTensor):
            return args[0]  # as for real tensors; for fake ones it would be a copy
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not tensors or any(isinstance(each, FakeTensor) or each.is_meta for each in tensors):
            if func is torch.ops.aten._local_scalar_dense.default and tensors:
                # Values that the host reads: counters of steps, and flags that are set in a step.
                return 0 if tensors[0].dtype is torch.bool else 1
            if func is torch.ops.aten._grouped_mm.default and tensors[0].dtype is torch.float32:
                return _grouped_product(*args, **kwargs)
            return func(*args, **kwargs)
        with unset_fake_temporarily():  # meshes hold real numbers of ranks, of which they compute others
            return func(*args, **kwargs)

    def called(self, graph: Graph, results: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Count a call of a compiled graph, and return its results."""
        self._note_resizes()
        self.flops += graph.flops
        self.collectives.extend(graph.collectives)
        self.memory.note_peak({"activations": graph.added_bytes})
        self.inside += 1
        outputs = results()
        self.inside -= 1
        self._allocated(outputs)
        return outputs

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Inner:
        """Run the code of an operator with a separate ledger, and return its counts."""
        own = Ledger(fuses=self.fuses, mode=self.mode)
        self.inside += 1  # a graph that is compiled within the counted step has not run yet
        with own:
            kept = function(*arguments)
        self.inside -= 1
        peak = own.memory.peak.bytes
        del kept
        return Inner(peak, own.flops, tuple(own.collectives))

    def _note_resizes(self) -> None:
        """Check only the first and the last gathered parameter of each module; update all if either has changed."""
        for tensors in self.gathered.values():
            ends = (*tensors[:1], *tensors[-1:])
            if sum(self.memory.resize(each.untyped_storage()) for each in ends):
                for tensor in tensors[1:-1]:
                    self.memory.resize(tensor.untyped_storage())
                self.memory.note_peak()

    def _allocated(self, result: Any) -> None:  # noqa: ANN401 (whatever an operator returns)
        for tensor in tree_leaves(result):
            takes_memory = not isinstance(tensor, FakeTensor) or tensor.fake_mode is self.mode
            if isinstance(tensor, Tensor) and takes_memory and not self.memory.knows(tensor):
                owner, within_kernel = owner_here()
                self.memory.add(tensor, owner)
                if not (within_kernel and self.fuses):
                    self.memory.note_peak()


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor, **_: Any) -> Tensor:  # noqa: ANN401 (as torch declares it)
    """Return an empty result of the right shape, which torch cannot infer for fp32."""
    groups = (len(offs),) if right.ndim == 2 else ()
    return left.new_empty((*groups, left.shape[0], right.shape[-1]))


def owner_here() -> tuple[Owner, bool]:
    """Return the owner of what is allocated here, and True if code in ``engine.kernels`` allocates it."""
    within_kernel = False
    for path, function in stack():
        within_kernel = within_kernel or KERNELS in path
        for place, name, owner in PLACES:
            if place in path and name in function:
                return owner, within_kernel
    return "activations", within_kernel


def stack() -> Iterator[tuple[str, str]]:
    """Yield the file and qualified name of each function that waits for the caller to return, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_qualname
        frame = frame.f_back


HOST = torch.device("cpu")
"""The device to count on, instead of the run's device."""


class SameBatches:
    """Micro-batches of the right shape with all values 0; each sequence is a single document."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device

    def step(self, number: int) -> StepData:  # noqa: ARG002 (every step has the same)
        shape = (self.layout.mbs, self.layout.seq_len)
        tokens, labels = (torch.zeros(shape, dtype=torch.int64, device=self.device) for _ in range(2))
        batches = [MicroBatch(tokens, labels, None)] * self.layout.ga
        return StepData(Figures(self.layout.ga * self.layout.mbs * self.layout.seq_len, 1, 0, 0), batches)


class MessageKind(NamedTuple):
    kind: str
    group: str


class Counts(NamedTuple):
    """The counts of one step: peak bytes by owner, FLOPs by kind, and messages and bytes by kind and group."""

    peak: Counter[str]
    flops: Counter[str]
    messages: Counter[MessageKind]
    bytes: Counter[MessageKind]

    def extended(self, fewer: "Counts", rounds: int) -> "Counts":
        """Return these counts plus ``rounds`` times their difference from the counts ``fewer``."""
        pairs: Any = zip(self, fewer, strict=True)
        return Counts(
            *(Counter({key: size + rounds * (size - less[key]) for key, size in own.items()}) for own, less in pairs)
        )


def account_of(
    plan: EnginePlan, stages: Sequence[TrainedStage], ranks: Ranks, ledger: Ledger, *, extends: bool
) -> RankAccount:
    """Run a rank's step under ``ledger``, and return the counts. extends: extrapolate a long step from shorter ones."""
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    for each in tree_leaves([list(optimizer.state.values()) for optimizer in optimizers]):
        ledger.memory.give(local_tensor(each.detach()), "optimizer")

    def counts(number: int, micro_batches: int) -> Counts:
        layout = plan.recipe.layout
        fewer = layout.model_copy(update={"gbs": layout.mbs * layout.dp * micro_batches})
        short = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"layout": fewer})})
        passes = build_passes(list(stages), short, ranks)
        gc.collect()
        ledger.begin()
        do_step(number, short, passes, optimizers, SameBatches(short.recipe.layout, ranks.device), ranks)
        return counted(ledger, ranks)

    layout = plan.recipe.layout
    each, wanted = layout.pp, layout.ga
    # A warm-up: afterwards everything is compiled, also for gradients that are added to others, torch knows all shapes,
    # and optimizers have their state.
    counts(0, min(max(each, 2), wanted))
    rounds, remainder = divmod(wanted - 4 * each, each)
    if not extends or rounds <= 0 or remainder:
        found = counts(1, wanted)
    else:
        fewer = counts(1, 3 * each)
        found = counts(2, 4 * each).extended(fewer, rounds)
    found.peak["other"] += plan.fused_workspace_bytes  # which a CPU does not allocate
    return RankAccount(
        rank=ranks.rank,
        pp_stage=ranks.pp_rank,
        peak_bytes=found.peak.total(),
        bytes_by_owner={owner: found.peak[owner] for owner in OWNERS},
        flops=found.flops.total(),
        flops_by_kind=dict(found.flops),
        collectives=tuple(
            CollectiveCount(kind=of.kind, group=of.group, count=count, bytes=found.bytes[of])
            for of, count in found.messages.items()
        ),
    )


def counted(ledger: Ledger, ranks: Ranks) -> Counts:
    names = group_names(ranks)
    messages, size = Counter[MessageKind](), Counter[MessageKind]()
    for each in ledger.collectives:
        group = MessageKind(each.kind, shown_group(each.group, names))
        messages[group] += 1
        size[group] += each.bytes
    return Counts(Counter(ledger.memory.peak.by), ledger.flops.copy(), messages, size)


def fake_account(plan: EnginePlan, rank: int) -> tuple[RankAccount, Ledger]:
    """Count one rank's memory, FLOPs and messages without the others; works once per process. Also return the
    ledger."""
    ranks = lone_rank(plan, rank, HOST)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(fuses=plan.device == "cuda", mode=mode)
    stages = shape_stages(plan, ranks, counting_backend(ledger.called, ledger.run, fuses=ledger.fuses))
    with ExitStack() as stack:
        stack.enter_context(attention_kernel("math" if plan.attention_backend == "math" else "flash"))
        stack.enter_context(mode)
        stack.enter_context(ledger)
        trained = give_memory(stages, plan, ranks)
        ledger.follow(stages)
        return account_of(plan, trained, ranks, ledger, extends=True), ledger


def main() -> None:
    job = AccountJob.model_validate_json(Path(sys.argv[1]).read_text())
    sys.stdout.write(fake_account(job.plan, job.rank)[0].model_dump_json() + "\n")


if __name__ == "__main__":
    main()
