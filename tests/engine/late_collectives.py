# SPDX-License-Identifier: Apache-2.0
"""Collectives that complete when they are waited for, and not before.

Between processes of one machine a collective is mostly complete before anything reads its result, so that a wait that
is missing, or comes too late, is seen on GPUs alone. Here a result holds no number until its ``wait``.

The functional collectives are replaced in torch's own namespace, where all eager code finds them, and the batches of
sends and receives of pipelines. A collective begins at once, on copies, in the order of the calls: otherwise ranks that
wait in different orders would wait for each other. Compiled code, and collectives that wait before they return, as
those of FSDP on a CPU and those of checkpoints, are as they were.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

real = torch.ops._c10d_functional
OPERATORS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
IN_PLACE = ("all_reduce_", "all_gather_into_tensor_out")
ABSENT = 127
"""For integers, which have no NaN."""


class Late:
    """One collective under way: ``copy`` gets its result, and ``result`` has no number before it is waited for."""

    unfinished: ClassVar[dict[int, Self]] = {}
    """By the memory of their results; each keeps its tensors, so that the memory is not used again."""

    def __init__(self, name: str, result: Tensor, copy: Tensor, taken: Tensor | None = None) -> None:
        self.name, self.result, self.copy, self.taken = name, result, copy, taken
        self.before = result if taken is None else taken.clone()
        self.unfinished[result.data_ptr()] = self

    @torch.no_grad()
    def finish(self, complete: Callable[[Tensor], Tensor]) -> None:
        del self.unfinished[self.result.data_ptr()]
        if (
            self.taken is not None
            and self.before is not None
            and not torch.equal(_bits(self.taken), _bits(self.before))
        ):
            raise AssertionError(f"what {self.name} takes was written before it was waited for")
        self.result.copy_(complete(self.copy).view(self.result.shape))


class LateReceive:
    """A tensor that arrives from another rank, which is there once ``wait`` returns."""

    def __init__(self, late: Late, work: dist.Work) -> None:
        self.late, self.work = late, work

    def wait(self) -> bool:
        self.work.wait()
        self.late.finish(lambda copy: copy)
        return True


def make_collectives_late() -> None:
    """For all groups of this process, from now on."""
    begin = {name: getattr(real, name) for name in (*OPERATORS, *IN_PLACE, "wait_tensor")}
    for name in OPERATORS:
        setattr(real, name, _late(name, begin[name]))
    real.all_reduce_ = _late_reduce(begin["all_reduce_"])
    real.all_gather_into_tensor_out = _late_gather(begin["all_gather_into_tensor"])
    real.wait_tensor = _wait(begin["wait_tensor"])
    dist.batch_isend_irecv = _late_batch(dist.batch_isend_irecv)


def _late(name: str, begin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def start(tensor: Tensor, *more: Any) -> Tensor:
        copy = begin(tensor.clone(), *more)
        result = torch.empty_like(copy)
        if not result.numel():
            return copy
        _empty(result)
        Late(name, result, copy, tensor)
        return result

    return start


def _late_reduce(begin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def start(tensor: Tensor, *more: Any) -> Tensor:
        copy = begin(tensor.clone(), *more)
        _empty(tensor)
        Late("all_reduce_", tensor, copy)
        return tensor

    return start


def _late_gather(begin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def start(own: Tensor, size: int, group: str, *, out: Tensor) -> Tensor:
        kept = own.clone()
        copy = begin(kept, size, group)
        _empty(out)
        own.copy_(kept)  # this rank's piece of ``out``, which it may read
        Late("all_gather_into_tensor_out", out, copy, own)
        return out

    return start


def _wait(wait: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def finish(tensor: Tensor) -> Tensor:
        late = Late.unfinished.get(tensor.data_ptr())
        if late is None:
            return wait(tensor)
        late.finish(wait)
        return tensor

    return finish


def _late_batch(begin: Callable[..., list[dist.Work]]) -> Callable[..., list[Any]]:
    def start(operations: Sequence[dist.P2POp]) -> list[Any]:
        lates = [_late_receive(each) if each.op is dist.irecv else None for each in operations]
        works = begin(list(operations))
        pairs = zip(lates, works, strict=True)
        return [work if late is None else LateReceive(late, work) for late, work in pairs]

    return start


def _late_receive(operation: dist.P2POp) -> Late:
    result = operation.tensor
    operation.tensor = torch.empty_like(result, requires_grad=False)
    _empty(result)
    return Late("irecv", result, operation.tensor)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@torch.no_grad()
def _empty(result: Tensor) -> None:
    result.fill_(float("nan") if result.is_floating_point() and result.element_size() > 1 else ABSENT)
