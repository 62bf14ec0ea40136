# SPDX-License-Identifier: Apache-2.0
"""Makes a worker of ``llmb run`` believe that it has a GPU and NCCL; nothing computes, see ``pretended_gpus``.

What is not there is stood in for: kernels (tensors are fake: shapes, dtypes and devices, but no values), streams and
events, the driver, NCCL. All else is the run's own: the worker, its threads, gloo's groups, files.
"""

# mypy: disable-error-code="no-untyped-call"

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from generated_graphs import generating
from pretended_torch import CPU, GPU, HOST, Queue, fake_tensors, on_the_host, pretend_gpu, replace
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

NAME, MEMORY_BYTES, CACHE_BYTES = "NVIDIA H200", 150_754_820_096, 60 * 2**20
ALLOCATED, PEAK, OUTSIDE = 3 * 2**30, 5 * 2**30, 2 * 2**30
LOSS, NORM = 2.5, 0.5
DIFFERENCE = float(os.environ.get("LLMB_TEST_DIFFERENCE", "0"))
"""What is found of each kernel."""
KEPT: list[object] = []


def pretend() -> None:
    KEPT.append(pretend_gpu(NAME, MEMORY_BYTES, CACHE_BYTES))
    _answer_for_cuda()
    _answer_for_nccl()
    _keep_copies_on_the_host()
    _exchange_objects()
    _write_zeros()
    _run_in_fake_mode()


def _answer_for_cuda() -> None:
    properties: Any = torch.cuda.get_device_properties(GPU)
    properties.uuid = f"GPU-{GPU.index:08d}"
    answers: dict[str, Any] = {
        "memory_allocated": ALLOCATED,
        "max_memory_allocated": PEAK,
        "memory_reserved": PEAK,
        "mem_get_info": (MEMORY_BYTES - PEAK - OUTSIDE, MEMORY_BYTES),
        "empty_cache": None,
        "cudart": SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
    }
    for name, answer in answers.items():
        replace(torch.cuda, name, lambda *_args, answer=answer, **_named: answer)
    replace(torch.cuda.nvtx, "range", lambda *_args, **_named: nullcontext())
    replace(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    replace(torch.cuda, "device_count", lambda: int(os.environ["LOCAL_WORLD_SIZE"]))
    replace(torch.cuda, "current_device", lambda: GPU.index)
    replace(Tensor, "pin_memory", pinned)
    replace(DTensor, "device", property(lambda tensor: tensor._local_tensor.device))
    replace(FakeTensor, "is_meta", property(lambda tensor: tensor.device.type == "meta"))
    replace(Tensor, "record_stream", lambda *_args: None)
    replace(torch, "Generator", Generator)
    for name in ("_exchange_device", "_maybe_exchange_device"):
        replace(torch.cuda, name, lambda *_args: GPU.index)
    replace(torch.accelerator, "current_accelerator", lambda *_args, **_named: torch.device("cuda"))
    replace(torch.accelerator, "current_device_index", lambda: GPU.index)
    replace(torch.cuda, "Event", TimedEvent)


class _IsGenerator(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, OF_TORCH)


OF_TORCH = torch.Generator


class Generator(metaclass=_IsGenerator):
    """Those of GPUs are in other libraries."""

    def __new__(cls, _device: object = CPU) -> Any:
        return OF_TORCH()


def pinned(tensor: Tensor, *_args: Any) -> Tensor:
    assert tensor.device == CPU, "only memory of the host can be pinned"
    return tensor


class TimedEvent(Queue):
    """Refuses what an event of torch refuses: a time without timing, or before it was recorded and waited for."""

    def __init__(self, *_args: Any, enable_timing: bool = False, **_named: Any) -> None:
        super().__init__()
        self.timing = enable_timing
        self.at: float | None = None

    def record(self, *_args: object) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "TimedEvent") -> float:
        if not (self.timing and end.timing) or self.at is None or end.at is None:
            raise ValueError("both events must have been recorded, with timing")
        return max(0.001, 1000 * (end.at - self.at))


class Options:
    """Of ``ProcessGroupNCCL``, as torch sets them."""

    is_high_priority_stream = False
    _timeout: Any = None


class Nccl:
    """``ProcessGroupNCCL`` is not in every build of torch, and would look for GPUs."""

    Options = Options

    def __new__(cls, _store: object, rank: int, size: int, _options: object) -> Any:
        made = FakeProcessGroup._create_internal(rank, size)
        KEPT.append(made)
        return made


def _answer_for_nccl() -> None:
    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, FakeProcessGroup)

    replace(FakeProcessGroup, "_set_sequence_number_for_group", lambda _group: None)
    replace(FakeProcessGroup, "_set_default_timeout", lambda _group, _limit: None)
    meta = Meta("ProcessGroupNCCL", (Nccl,), {})
    replace(c10d, "ProcessGroupNCCL", meta)
    replace(dist, "ProcessGroupNCCL", meta)
    for module in (c10d, dist, device_mesh):
        replace(module, "is_nccl_available", lambda: True)
        replace(module, "split_group", split_group)


def split_group(
    parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, pg_options: Any = None, group_desc: Any = None
) -> Any:
    """The checks of torch's own, which then asks NCCL."""
    assert c10d._get_default_group().bound_device_id == GPU
    assert parent_pg is c10d._get_default_group()
    assert parent_pg._get_backend(torch.device("cuda")).name() == "fake"
    made = [dist.new_group(ranks, timeout, group_desc=group_desc, pg_options=pg_options) for ranks in split_ranks]
    return next((group for group, ranks in zip(made, split_ranks, strict=True) if dist.get_rank() in ranks), None)


def _keep_copies_on_the_host() -> None:
    """C++, for which all is on the CPU, would copy nothing to it. Numbers that the host reads are 1, or False."""
    create: Callable[..., Any] = FakeTensorMode.dispatch
    move: Callable[..., Any] = Tensor.to

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0 if args[0].dtype is torch.bool else 1
        return create(mode, func, types, args, kwargs or {})

    def to(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        target = named.get("device", args[0] if args else None)
        if isinstance(target, str | torch.device) and torch.device(target).type == "cpu" and is_on_gpu(tensor):
            copied: Tensor = on_host(tensor)
            return copied
        if isinstance(tensor, FunctionalTensor) and isinstance(target, str):
            return tensor  # of a distributed one: for C++ it is on the CPU, and so not where its mesh is
        moved: Tensor = move(tensor, *args, **named)
        return moved

    replace(FakeTensorMode, "dispatch", dispatch)
    replace(Tensor, "to", to)
    replace(Tensor, "cpu", lambda tensor: to(tensor, CPU))


def on_host(tensor: Any) -> Any:
    mode = tensor.fake_mode
    meant = getattr(mode, HOST, False)
    with on_the_host(mode):
        copied = torch.ops.aten._to_copy.default(tensor, device=CPU)
    replace(mode, HOST, meant)
    return copied


def is_on_gpu(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.device == GPU


def _exchange_objects() -> None:
    """Through tensors that have values: over the shadow of NCCL's group, or gloo's as it is."""
    shadows: dict[tuple[int, ...], Any] = {}

    def wrapped(usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, device: Any = None, **named: Any) -> Any:
            own = group or c10d._get_default_group()
            with unset_fake_temporarily():
                if isinstance(own, dist.ProcessGroup) and dist.get_backend(own) == "nccl":
                    # An object of NCCL's goes by way of the GPU.
                    assert device is None or torch.device(device).type == "cuda", device
                    ranks = tuple(dist.get_process_group_ranks(own))
                    if ranks not in shadows:
                        shadows[ranks] = dist.new_group(list(ranks), backend="gloo")
                        shadows[ranks].bound_device_id = None  # gloo's has no GPU
                    own = shadows[ranks]
                return usual(*args, group=own, **named)

        return call

    for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier"):
        new = wrapped(getattr(dist, name))
        for module in (dist, c10d):
            replace(module, name, new)


def _write_zeros() -> None:
    """Where tensors without values would be written; those of a thread get values in the thread that trains."""
    import llmb.engine.checkpoint.load as loading
    from llmb.engine.checkpoint.save import Saver, Staging

    # torch computes with tensors which part of each is this rank's.
    replace(loading, "read_state", with_values(loading.read_state))
    for name in ("_write", "_plan_writes"):
        replace(Saver, name, with_values(getattr(Saver, name)))
    usual, copy = torch.save, Staging.copy

    def save(tensor: Any, *args: Any, **named: Any) -> Any:
        return usual(zeros(tensor), *args, **named)

    def staged(staging: Any, state: Any, device: Any) -> Any:
        return {name: zeros(tensor) for name, tensor in copy(staging, state, device).items()}

    replace(torch, "save", save)
    replace(Staging, "copy", staged)


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Within, new tensors have values."""

    def called(*args: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **named)

    return called


def zeros(tensor: Any) -> Any:
    if not isinstance(tensor, FakeTensor):
        return tensor
    assert tensor.device == CPU, "what is written has to be on the host"
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def with_groups(make: Callable[..., Any]) -> Callable[..., Any]:
    """Meshes have values, numbers of ranks. Later, compiled code would ask an accelerator for streams to use."""

    def made(*args: Any, **named: Any) -> Any:
        replace(torch.accelerator, "is_available", lambda: True)
        try:
            with unset_fake_temporarily():
                return make(*args, **named)
        finally:
            replace(torch.accelerator, "is_available", lambda: False)

    return made


def _run_in_fake_mode() -> None:
    import llmb.engine.attention_backend as attention_backend
    import llmb.engine.kernel_check as kernel_check
    import llmb.engine.loop as loop
    import llmb.engine.parallel.exchange as exchange
    import llmb.engine.profile as profiling
    import llmb.engine.timing as timing
    from llmb.engine.model import attention
    from llmb.engine.parallel import context_parallel, mesh
    from llmb.engine.parallel.expert_parallel import ParallelExperts

    train, step, read = loop.train, loop.do_step, timing.StepReader._read
    plan = ParallelExperts.balance

    def train_fake(*args: Any) -> None:
        with generating(), fake_tensors() as mode, on_the_host(mode):
            replace(loop, "MODE", mode)
            train(*args)

    def step_fake(*args: Any) -> Any:
        mode: Any = loop.MODE  # type: ignore[attr-defined]
        replace(mode, HOST, False)
        try:
            return step(*args)
        finally:
            replace(mode, HOST, True)

    def read_values(self: Any, pending: Any) -> Any:
        assert isinstance(pending.values, FakeTensor), "the values of a step are the device's"
        assert pending.values.device == CPU
        with unset_fake_temporarily():
            values = torch.full(pending.values.shape, NORM, dtype=pending.values.dtype)
            values[0] = LOSS if pending.has_loss else 0
            pending.values = values
            return read(self, pending)

    def balance(experts: Any, places: Tensor, parts: Any) -> Any:
        """The host computes it once, from numbers."""
        with unset_fake_temporarily():
            found = plan(experts, places, [part._replace(rows=torch.empty(len(part.rows))) for part in parts])
        return [one._replace(**fake_copies(one, parts[0].rows.device)) for one in found]

    def fake_copies(one: Any, device: torch.device) -> dict[str, Tensor]:
        tensors = {name: getattr(one, name) for name in ("order", "back", "counts")}
        return {name: torch.empty(each.shape, dtype=each.dtype, device=device) for name, each in tensors.items()}

    replace(ParallelExperts, "balance", balance)
    replace(mesh, "join_ranks", with_groups(mesh.join_ranks))
    for name in ("__init__", "_flatten", "_unflatten"):
        replace(DeviceMesh, name, with_groups(getattr(DeviceMesh, name)))
    # What attention and kernels compute has no values, so that nothing can be wrong with them.
    replace(attention_backend, "accuracy_problem", lambda *_args: None)
    replace(kernel_check, "difference_of", lambda parts: DIFFERENCE if list(parts) else None)
    # A mask that is a kind of tensor itself; what it masks has no values.
    for module in (attention, context_parallel):
        replace(module, "causal_lower_right", lambda _queries, _keys: None)
    # Without a GPU, torch would log an error for each operator.
    replace(profiling, "profile", lambda activities: torch.profiler.profile(activities=activities[:1]))
    # It asks the device which rows are this rank's.
    replace(exchange.TrainedStage, "initialize", lambda *_args: None)
    replace(loop, "train", train_fake)
    replace(loop, "do_step", step_fake)
    replace(timing.StepReader, "_read", read_values)
