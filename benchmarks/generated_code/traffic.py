# SPDX-License-Identifier: Apache-2.0
"""What operators outside of compiled code read and write, and how much memory is in use, while tensors are fake."""

# mypy: disable-error-code="no-untyped-call"

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.generated_code.accesses import SECTOR_BYTES
from benchmarks.generated_code.capture import ATTENTION, PRODUCTS, Graph
from benchmarks.generated_code.kernels import Kernel
from benchmarks.generated_code.pretend import replace
from benchmarks.generated_code.records import Direction
from llmb import engine
from llmb.engine.account.graphs import makes_view
from llmb.engine.model.decoder import Decoder, MoEBlock
from llmb.engine.model.local_shard import local_tensor
from llmb.engine.model.loss import Head

WITHOUT_TRAFFIC = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense",
                   "record_stream", "set_", "resize_")  # fmt: skip
ONLY_WRITTEN = ("copy_", "zero_", "fill_", "_foreach_zero_", "_foreach_copy_")
"""Operators that do not read what they change in place."""


def traffic(func: Any, name: str, args: Any, kwargs: Any, results: Any) -> int:
    """Bytes of every argument that is read, of every argument that is written, and of new results."""
    read, written, seen = 0, 0, set[int]()
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        size = sum(tensor_bytes(each) for each in tree_leaves(value) if isinstance(each, Tensor))
        changes = argument.alias_info is not None and argument.alias_info.is_write
        written += size if changes else 0
        read += size if not (changes and (name in ONLY_WRITTEN or argument.is_out)) else 0
        seen.update(id(each) for each in tree_leaves(value))
    new = [each for each in tree_leaves(results) if isinstance(each, Tensor) and id(each) not in seen]
    return read + written + sum(map(tensor_bytes, new))


def tensor_bytes(tensor: Tensor) -> int:
    """Without the elements that a view repeats."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.itemsize


COPIES = ("clone", "copy_", "_to_copy")
ACCUMULATING = ("add_", "_foreach_add_", "addmm", "addmm_")
ACTIVATIONS = ("model/",)
ENGINE = Path(engine.__file__).parent
FSDP = "distributed/fsdp"
TYPICAL = 2
"""The second micro-batch is neither the first, whose gradients are added to nothing, nor the last, after which FSDP
reduces."""
OWNERS = ("llmb.engine", "torch.nn", "torch.optim")
COMPILED = "compiled code"


Owner = Literal["dense", "experts", "routed", "others"]
CALLERS: Mapping[str, Owner] = {
    MoEBlock.run_experts.__qualname__: "routed",
    MoEBlock.compute.__qualname__: "experts",
    Head.forward.__qualname__: "others",
    Decoder.forward.__qualname__: "dense",
}
"""Functions of the engine, and of what the code is that they call: layers, or in them routed experts alone."""


class Place(NamedTuple):
    """A function of the engine, or of FSDP, that called an operator, directly or through torch."""

    function: str
    operator: str


@dataclass(frozen=True, slots=True)
class Use:
    """Memory in use at the moment when most was, by what allocated it."""

    bytes: int = 0
    by: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Between:
    """What runs outside of compiled code in one pass of routed experts, of all layers, in a typical micro-batch."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    products: int = 0


class Traffic(TorchDispatchMode):
    """bytes: read and written. What was allocated before is known from ``keep`` or its first use.

    experts: what a pass counts if it is in ``within``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[Place] = Counter()
        self.peak = Use()
        self.live: Counter[str] = Counter()
        self.total = 0
        self.sizes: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self.inside = 0
        self.uncoalesced_copies = 0
        self.launched = 0
        self.counts = False
        self.marks: list[Counter[Place]] = []
        self.experts: dict[Direction, Between] = {"forward": Between(), "backward": Between()}
        self.within: Direction | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code runs under it."""
        return True

    def mark(self) -> None:
        """Keeps what was counted so far."""
        self.marks.append(self.bytes.copy())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside or func.namespace == "prim":
            return func(*args, **kwargs)
        self.allocated((args, kwargs), calling)
        launched = self.launched
        results = func(*args, **kwargs)
        name = str(func).split(".")[1]
        if name not in WITHOUT_TRAFFIC and not makes_view(func):
            apart = name in PRODUCTS or ATTENTION in name or self.launched != launched
            own = 0 if apart else traffic(func, name, args, kwargs, results)
            self._note(Kernel(name, own, ours=True))
            self.uncoalesced_copies += name in COPIES and transposes(args[-1 if name == "copy_" else 0], results)
        self.allocated(results, calling)
        return results

    def launch(self, kernel: Kernel, tensors: Sequence[Tensor]) -> None:
        """Counts a kernel of the engine; see ``launches``."""
        if self.counts and not self.inside:
            self.launched += 1
            self.allocated(tensors, calling)
            self._note(kernel)

    def _note(self, kernel: Kernel) -> None:
        place = Place(calling(), kernel.name)
        self.bytes[place] += kernel.bytes
        if self.within is not None and len(self.marks) == TYPICAL:
            found = self.experts[self.within]
            found.products += kernel.name in PRODUCTS
            if kernel.bytes and not accumulates(place):
                found.kernels[kernel] += 1

    def keep(self, name: str, holder: Any) -> None:
        """Gives the tensors that ``holder`` holds a name."""
        self.allocated([local_tensor(each) for each in tensors_of(holder, set())], lambda: name)

    def enter(self, graph: Graph) -> None:
        self._note_peak(graph.added_bytes)
        self.inside += 1

    def leave(self, _graph: Graph, results: Any) -> None:
        self.inside -= 1
        self.allocated(results, lambda: COMPILED)

    def allocated(self, results: Any, by: Any) -> None:
        for tensor in tree_leaves(results):
            if not isinstance(tensor, Tensor) or tensor.device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self.sizes:
                continue
            self._add(storage, by())
        self._note_peak(0)

    def _add(self, storage: torch.UntypedStorage, by: str) -> None:
        if not storage.nbytes():
            return
        key = storage._cdata
        self.sizes[key] = (weakref.ref(storage, partial(self._freed, key)), by, storage.nbytes())
        self.live[by] += storage.nbytes()
        self.total += storage.nbytes()

    def _freed(self, key: int, _reference: object) -> None:
        _, by, size = self.sizes.pop(key)
        self.live[by] -= size
        self.total -= size

    def resized(self, storage: torch.UntypedStorage) -> None:
        known = self.sizes.get(storage._cdata)
        if known is None:
            return
        reference, by, size = known
        change = storage.nbytes() - size
        self.sizes[storage._cdata] = (reference, by, storage.nbytes())
        self.live[by] += change
        self.total += change
        self._note_peak(0)

    def _note_peak(self, more: int) -> None:
        if self.total + more > self.peak.bytes:
            by = {name: size for name, size in self.live.items() if size}
            self.peak = Use(self.total + more, by | ({"within compiled code": more} if more else {}))


def accumulates(place: Place) -> bool:
    """True for what adds to sums of gradients."""
    return place.operator in ACCUMULATING and not place.function.startswith(ACTIVATIONS)


@contextmanager
def following_resizes(traffic: Traffic) -> Iterator[None]:
    """FSDP frees and allocates by resizing storages."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        traffic.resized(storage)
        return result

    replace(torch.UntypedStorage, "resize_", resize)
    try:
        yield
    finally:
        replace(torch.UntypedStorage, "resize_", original)


def tensors_of(holder: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that an object of the engine, a module or an optimizer refers to, at any depth."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    if isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, Mapping):
        parts = [*holder.keys(), *holder.values()]
        yield from (tensor for part in parts for tensor in tensors_of(part, seen))
    elif isinstance(holder, list | tuple | set):
        yield from (tensor for part in holder for tensor in tensors_of(part, seen))
    elif type(holder).__module__.startswith(OWNERS):
        yield from tensors_of(vars(holder) if hasattr(holder, "__dict__") else {}, seen)


def transposes(source: Any, target: Any) -> bool:
    """True if neighbors of the result were not neighbors before."""
    if not isinstance(source, Tensor) or source.ndim < 2 or not target.is_contiguous():
        return False
    return source.stride(-1) * source.itemsize >= SECTOR_BYTES and source.shape[-1] > 1


def calling() -> str:
    """The innermost function of the engine on the stack, and FSDP if that called on its behalf."""
    for path, function in stack():
        if FSDP in path:
            return "FSDP"
        if path.startswith(str(ENGINE)):
            return f"{Path(path).relative_to(ENGINE).with_suffix('')}.{function}"
    return "elsewhere"


def calling_owner() -> Owner:
    return next((CALLERS[function] for path, function in stack() if function in CALLERS), "others")


def stack() -> Iterator[tuple[str, str]]:
    """File and qualified name of each function, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_qualname
        frame = frame.f_back
