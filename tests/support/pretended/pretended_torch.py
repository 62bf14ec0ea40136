# SPDX-License-Identifier: Apache-2.0
"""Makes this process believe that it has a GPU, so that code for one is generated and nothing runs.

Tensors are fake: they have a shape, a dtype and the device ``cuda:0``, and no values. Inductor asks the driver for the
device's properties, which are given here. All of it changes torch for the whole process, so only a process that is
started for that may call ``pretend_gpu``.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor
import torch._subclasses.fake_tensor as fake_tensor
import torch.utils._triton as triton_support
from torch import Tensor
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
from torch._inductor.runtime import triton_helpers
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

HOST = "llmb_host"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HOPPER: Mapping[str, Any] = MappingProxyType(
    {
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
        "max_threads_per_block": 1024,
        "warp_size": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_multiprocessor": 233472,
        "shared_memory_per_block_optin": 232448,
        "gcnArchName": "",
    }
)
"""What the driver says of an H100 and an H200."""


def pretend_gpu(name: str, memory_bytes: int, cache_bytes: int) -> torch.library.Library:
    """``name``: as the driver would have it. The result has to be kept."""
    properties = SimpleNamespace(name=name, total_memory=memory_bytes, L2_cache_size=cache_bytes, **HOPPER)
    _answer_for_the_driver(properties)
    _answer_for_inductor(properties)
    _keep_autograd_on_the_cpu()
    _give_shapes_of_products()
    replace(functional, "scaled_dot_product_attention", cudnn_attention)
    return _kernels_of_gpu_builds()


def _answer_for_the_driver(properties: SimpleNamespace) -> None:
    answers: Mapping[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "is_current_stream_capturing": False,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        replace(torch.cuda, name, _always(answer))
    for name in ("_lazy_init", "set_device", "synchronize", "reset_peak_memory_stats"):
        replace(torch.cuda, name, _always(None))
    for module in (torch.cuda, torch.cuda.random):
        replace(module, "get_rng_state", _always(torch.zeros(16, dtype=torch.uint8)))
        replace(module, "set_rng_state", _always(None))
    for name in ("Stream", "Event"):
        replace(torch.cuda, name, Queue)
    replace(torch.cuda, "current_stream", _always(Queue()))
    replace(torch.cuda, "stream", _always(nullcontext()))
    replace(torch.accelerator, "current_stream", _always(Queue()))
    replace(torch.accelerator, "is_available", _always(False))
    torch.version.cuda = "13.0"


def _answer_for_inductor(properties: SimpleNamespace) -> None:
    interface = device_interface.CudaInterface
    for name, answer in {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "get_compute_capability": 10 * properties.major + properties.minor,
        "is_bf16_supported": True,
        "raise_if_triton_unavailable": None,
    }.items():
        replace(interface, name, staticmethod(_always(answer)))
    for name, answer in {"get_device_properties": properties, "current_device": 0}.items():
        replace(interface.Worker, name, staticmethod(_always(answer)))
    target = GPUTarget("cuda", 10 * properties.major + properties.minor, properties.warp_size)
    driver.set_active(SimpleNamespace(get_current_target=_always(target), get_current_device=_always(0)))
    replace(triton_support, "triton_hash_with_backend", _always("none"))
    replace(triton_support, "has_triton", _always(True))
    replace(triton_helpers, "set_driver_to_gpu", _always(None))
    # Patterns that are found by tracing examples on the device; none of them is in a block.
    for passes in (fuse_attention, pad_mm, misc_patterns):
        for name in dir(passes):
            if name.startswith("_") and name.endswith("_init"):
                replace(passes, name, _always(None))
    folder = joint_graph.UniformValueConstantFolder
    fold = folder.run

    def fold_on_host(self: Any) -> Any:
        with _OnHost():
            return fold(self)

    replace(folder, "run", fold_on_host)
    # Addresses are not there to be checked.
    replace(compile_fx, "get_input_idxs_to_check", _always(()))
    inductor.compile_threads = 1
    inductor.fx_graph_cache = False
    inductor.triton.unique_kernel_names = True


class Queue:
    """A stream, or an event: there is nothing to wait for."""

    device = GPU

    def __init__(self, *_args: Any, **_named: Any) -> None:
        pass

    def record_event(self, _event: object = None) -> "Queue":
        return self

    def record(self, *_args: object) -> None: ...
    def wait(self, *_args: object) -> None: ...
    def wait_stream(self, _stream: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...
    def synchronize(self) -> None: ...


class _OnHost(TorchDispatchMode):
    """Constants that Inductor computes while it compiles."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": CPU} if kwargs.get("device") == GPU else kwargs))


def replace(owner: object, name: str, value: object) -> None:
    """Sets an attribute of torch, of whatever type."""
    setattr(owner, name, value)


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_args, **_named: answer


def _kernels_of_gpu_builds() -> torch.library.Library:
    """Without a kernel for GPUs, as in a build for CPUs, torch would differentiate the parts of these operators."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _always(None), "CUDA")
    return library


def _give_shapes_of_products() -> None:
    """torch has none for FP8 products into a given result."""

    def result(_mode: object, _func: object, *_args: object, out: Tensor, **_named: object) -> Tensor:
        return out

    fake_impls.register_op_impl(torch.ops.aten._scaled_mm.out)(result)


def _keep_autograd_on_the_cpu() -> None:
    """Python sees ``cuda:0`` as a fake tensor's device, and C++ sees the CPU.

    The autograd engine would otherwise look for the threads and streams of a device that is not there. What C++ then
    asks to be created on the CPU is created on ``cuda:0``, but for ``on_the_host``.
    """
    original: Callable[..., Any] = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def for_cpp(args: tuple[FakeTensor, ...]) -> torch.device:
        return torch.device("meta" if args[0].fake_mode.in_kernel_invocation else "cpu")

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})) -> Any:
        return for_cpp(args) if func is torch.ops.prim.device.default else original(cls, func, types, args, kwargs)

    create: Callable[..., Any] = FakeTensorMode.dispatch

    def on_gpu(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == CPU:
            return 0 if args[0].dtype is torch.bool else 1  # on the host, which waits for no device
        stays = kwargs.get("device") != CPU or getattr(mode, HOST, False)
        moved = kwargs if stays else {**kwargs, "device": GPU}
        return create(mode, func, types, args, moved)

    replace(FakeTensorMode, "dispatch", on_gpu)
    fake_tensor._DISPATCH_META_HANDLERS[torch.ops.prim.device.default] = for_cpp  # type: ignore[assignment]
    replace(FakeTensor, "__torch_dispatch__", classmethod(dispatch))
    replace(FakeTensor, "is_cuda", property(_on("cuda")))
    replace(FakeTensor, "is_cpu", property(_on("cpu")))
    replace(FakeTensor, "data_ptr", address)
    replace(fake_tensor, "init_gpu_context", _always(None))
    replace(FakeTensorMode, "avoid_device_init", property(_always(True)))
    replace(torch._C, "_ensureCUDADeviceGuardSet", _always(None))


def address(tensor: Tensor) -> int:
    """Each storage has space of its own; views of it are where they would be."""
    storage: int = tensor.untyped_storage()._cdata
    return (storage << 40) + int(tensor.storage_offset()) * tensor.itemsize


def _on(kind: str) -> Callable[[Tensor], bool]:
    return lambda tensor: tensor.device.type == kind


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch would ask the device which backend it supports."""
    del enable_gqa  # the kernel has grouped heads
    attended: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, False, scale=scale
    )[0]
    return attended


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Within, nothing computes or takes memory."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@contextmanager
def on_the_host(mode: FakeTensorMode) -> Iterator[None]:
    """Within, tensors on the CPU are meant to be there. Their values, if asked for, are 1, or False."""
    setattr(mode, HOST, True)
    try:
        yield
    finally:
        setattr(mode, HOST, False)
