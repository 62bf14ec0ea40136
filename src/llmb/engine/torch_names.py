# SPDX-License-Identifier: Apache-2.0
"""The private names of torch that llmb uses; programs check them before they import modules that need them."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from inspect import get_annotations

import torch

from llmb.base.errors import EnvironmentProblem


def _names(module: str, names: str) -> Iterator[str]:
    return (f"{module}.{name}" for name in names.split())


TRIED = ("2.11", "2.13")
"""Versions of torch tested by training: 2.11 on an H200, 2.13 on CPUs."""
ENGINE = (
    *_names("torch._C._distributed_c10d", "FakeWork FileStore PrefixStore Store TCPStore _resolve_process_group"),
    *_names("torch._C", "_set_sm_carveout_experimental"),
    *_names("torch._dynamo", "mark_dynamic"),
    *_names("torch", "_foreach_add_ _foreach_norm _fused_adamw_ _grouped_mm _scaled_grouped_mm _scaled_mm"),
    *_names("torch.UntypedStorage", "_cdata"),
    *_names("torch.distributed.ProcessGroupGloo._Options", "_devices _threads _timeout"),
    *_names("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *_names("torch.distributed.device_mesh.DeviceMesh", "_flatten _unflatten"),
    *_names("torch.distributed.distributed_c10d", "_get_default_group _set_pg_timeout _world"),
    *_names("torch.distributed.pipelining._backward", "stage_backward"),
    *_names("torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime"),
    *_names("torch.distributed.pipelining.stage.PipelineStage", "_prepare_backward_infra _prepare_forward_infra"),
    *_names("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset"),
    *_names("torch.nn.Module", "_apply _backward_hooks _forward_hooks _forward_pre_hooks"),
    *_names("torch.nn.attention.varlen._varlen_attn", "_opoverload"),
    *_names("torch.ops", "_c10d_functional"),
    *_names("torch.ops.aten", "_efficient_attention_forward _grouped_mm _scaled_dot_product_cudnn_attention"),
    *_names("torch.ops.aten", "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention"),
    *_names("torch.ops.aten", "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
    *_names("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_mm"),
    *_names("torch.ops.torch_attn", "_varlen_attn"),
    *_names("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    *_names("torch.utils._python_dispatch", "_get_current_dispatch_mode _pop_mode_temporarily"),
    *_names("torch.utils._pytree", "tree_leaves tree_map"),
    *_names("torch.utils.checkpoint", "_CachedTorchDispatchMode _CachingTorchDispatchMode"),
)
"""Names for training."""
ACCOUNT = (
    *_names("torch._dynamo.backends.common", "aot_autograd"),
    *_names("torch._functorch._aot_autograd.utils", "make_boxed_func"),
    *_names("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
    *_names("torch._inductor.decomposition", "select_decomp_table"),
    *_names("torch._ops", "OpOverload"),
    *_names("torch._subclasses.fake_tensor", "FakeTensor FakeTensorMode unset_fake_temporarily"),
    *_names("torch.distributed._tools", "fake_collectives"),
    *_names("torch.nn.attention.varlen._varlen_attn", "_init_fn"),
    *_names("torch.ops.aten", "_local_scalar_dense _to_copy _unsafe_view"),
    *_names("torch.ops.aten.mm.default", "_overloadpacket _schema"),
    *_names("torch.utils._python_dispatch", "TorchDispatchMode"),
)
"""Additional names for counting the memory, FLOPs and collectives of a rank."""
FUSED = ("torch.distributed._symmetric_memory.get_symm_mem_workspace",)
"""Additional names for ``--communication fused``."""
WEIGHTS = ("torch.distributed.checkpoint.utils._create_file_view",)
"""Additional names for converting weights."""
BENCH = ("torch.cuda._sleep",)
"""Additional names for ``llmb bench``."""


def check_names(names: Iterable[str]) -> None:
    """Raise EnvironmentProblem if the installed torch lacks one of ``names``."""
    if missing := list(missing_names(names)):
        raise EnvironmentProblem(
            f"torch {torch.__version__} lacks functions that llmb uses: {', '.join(missing)}",
            where=str(torch.__file__),
            do=f"use a version that llmb was tested with: {' or '.join(TRIED)}",
        )


def missing_names(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        try:
            resolve_name(name)
        except (ImportError, AttributeError):
            yield name


def resolve_name(name: str) -> object:
    """Return the named object, or None if only instances have it; raise ImportError or AttributeError if missing."""
    first, *rest = name.split(".")
    path = first
    owner: object = import_module(first)
    for part in rest:
        path = f"{path}.{part}"
        owner = _attribute(owner, path, part)
    return owner


def _attribute(owner: object, path: str, part: str) -> object:
    if isinstance(owner, type) and part in get_annotations(owner):  # each instance has it
        return getattr(owner, part, None)
    try:
        return getattr(owner, part)
    except AttributeError:
        return import_module(path)


def untried(version: str) -> str | None:
    """Return the note for results with an untested version of torch; None for a version in ``TRIED``."""
    if ".".join(version.split(".")[:2]) in TRIED:
        return None
    return f"torch {version} has never been tested with this version of llmb, only {' and '.join(TRIED)}"
