# SPDX-License-Identifier: Apache-2.0
"""Collectives that complete when they are waited for, and not before.

Between processes of one machine a collective is mostly complete before anything reads its result, so that a wait that
is missing, or comes too late, is seen on GPUs alone. Here a result holds no number until its ``wait``, and what a
collective reads or writes must not change meanwhile.

All ways to begin a collective (functional ones, also in compiled code, those of FSDP and DTensor, sends and receives,
those of objects) end in the operators below. The collective itself begins at once, on copies, in the order of the
calls: otherwise ranks that wait in different orders would wait for each other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

WRITTEN: dict[str, str | None] = {
    "allreduce_": "tensors",
    "allreduce_coalesced_": "tensors",
    "broadcast_": "tensors",
    "reduce_": "tensors",
    "allgather_": "output_tensors",
    "_allgather_base_": "output_tensor",
    "allgather_into_tensor_coalesced_": "outputs",
    "reduce_scatter_": "output_tensors",
    "_reduce_scatter_base_": "output_tensor",
    "reduce_scatter_tensor_coalesced_": "outputs",
    "alltoall_": "output_tensors",
    "alltoall_base_": "output",
    "gather_": "output_tensors",
    "scatter_": "output_tensors",
    "send": None,
    "recv_": "tensors",
}
"""The argument that each operator of torch's ``c10d`` writes."""
ABSENT = 127
"""For integers, which have no NaN."""
library = torch.library.Library("c10d", "IMPL")
held: deque[Tensor] = deque(maxlen=4096)
"""Views of the latest copies, which keep these: gloo's thread waits for Python's lock where it is the last to let go of
a tensor, and holds a lock meanwhile that the next collective waits for, with Python's lock."""


class LateWork(dist.Work):
    """One collective under way: ``copies`` of its tensors have the results before the tensors themselves do."""

    unfinished: ClassVar[set[Self]] = set()
    """Kept here as well as by who waits, which may be C++."""

    def __init__(self, name: str, work: dist.Work, given: Sequence[Any], copies: Sequence[Any], written: int | None):
        """``given`` to the operator, ``copies`` to the collective; ``written`` is the number of its results."""
        super().__init__()
        self.name, self.work, self.written = name, work, written
        self.given, self.copies = given, copies
        self.before = [tensor.clone() for tensor in tensors(given)]
        self.unfinished.add(self)

    @torch.no_grad()
    def wait(self, timeout: timedelta | None = None) -> bool:
        if self in self.unfinished:
            self.unfinished.remove(self)
            self.work.wait()
            for tensor, before in zip(tensors(self.given), self.before, strict=True):
                if tensor.untyped_storage().size() and not torch.equal(_bits(tensor), _bits(before)):
                    raise AssertionError(f"a tensor of {self.name} was written before it was waited for")
            for result, copy in zip(results(self.given, self.written), results(self.copies, self.written), strict=True):
                result.copy_(copy)
        return True

    def is_completed(self) -> bool:
        return self not in self.unfinished


def tensors(arguments: Any) -> list[Tensor]:
    return [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]


def results(arguments: Sequence[Any], written: int | None) -> list[Tensor]:
    return [] if written is None else tensors(arguments[written])


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def make_collectives_late() -> None:
    """For all groups of this process on CPUs, from now on."""
    for name, written in WRITTEN.items():
        library.impl(name, _late(name, written), "CPU", with_keyset=True, allow_override=True)


def _late(name: str, written: str | None) -> Callable[..., Any]:
    schema = getattr(torch.ops.c10d, name).default._schema
    begin = torch.library.get_kernel(f"c10d::{name}", "CPU")
    names = [argument.name for argument in schema.arguments]
    place = names.index(written) if written else None
    has_results = len(schema.returns) > 1

    def start(keyset: torch._C.DispatchKeySet, *given: Any) -> Any:
        arguments = [*given, *(argument.default_value for argument in schema.arguments[len(given) :])]
        copies = tree_map_only(Tensor, torch.clone, arguments)
        held.extend(copy.view_as(copy) for copy in tensors(copies))
        begun = begin.call_boxed(keyset, *copies)
        _empty(results(arguments, place), tensors([each for at, each in enumerate(arguments) if at != place]))
        work = LateWork(name, dist.Work.unbox(begun[-1] if has_results else begun), arguments, copies, place)
        return (arguments[place], work.boxed()) if has_results else work.boxed()

    return start


@torch.no_grad()
def _empty(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Inputs that are a part of a result, such as a rank's own piece of what is gathered, keep their values."""
    kept = [tensor.clone() for tensor in inputs]
    for result in results:
        result.fill_(float("nan") if result.is_floating_point() and result.element_size() > 1 else ABSENT)
    for tensor, values in zip(inputs, kept, strict=True):
        tensor.copy_(values)
