# SPDX-License-Identifier: Apache-2.0
"""The private names of torch that are used here, which any version of torch may rename or remove.

A program checks them before it imports the modules that need them. All are there in the versions of ``TRIED``.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from inspect import get_annotations

import torch

from llmb.errors import EnvironmentProblem

TRIED = ("2.11", "2.13")
"""Versions of torch that trained: 2.11 on an H200, 2.13 on CPUs."""
ENGINE = (
    "torch._C._distributed_c10d.FakeWork",
    "torch._C._distributed_c10d.FileStore",
    "torch._C._distributed_c10d.PrefixStore",
    "torch._C._distributed_c10d.Store",
    "torch._C._distributed_c10d.TCPStore",
    "torch._C._distributed_c10d._resolve_process_group",
    "torch._dynamo.mark_dynamic",
    "torch._foreach_add_",
    "torch._foreach_norm",
    "torch._fused_adamw_",
    "torch._grouped_mm",
    "torch._scaled_mm",
    "torch.UntypedStorage._cdata",
    "torch.distributed.ProcessGroupGloo._Options._devices",
    "torch.distributed.ProcessGroupGloo._Options._threads",
    "torch.distributed.ProcessGroupGloo._Options._timeout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.device_mesh.DeviceMesh._flatten",
    "torch.distributed.device_mesh.DeviceMesh._unflatten",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    "torch.distributed.pipelining.stage.PipelineStage._prepare_backward_infra",
    "torch.distributed.pipelining.stage.PipelineStage._prepare_forward_infra",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.nn.Module._apply",
    "torch.nn.Module._backward_hooks",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
    "torch.nn.attention.varlen._varlen_attn._opoverload",
    "torch.ops._c10d_functional",
    "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._grouped_mm",
    "torch.ops.aten._scaled_dot_product_cudnn_attention",
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward",
    "torch.ops.aten._scaled_dot_product_efficient_attention",
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch.ops.aten._scaled_mm",
    "torch.ops.torch_attn._varlen_attn",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.utils._python_dispatch._get_current_dispatch_mode",
    "torch.utils._python_dispatch._pop_mode_temporarily",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils.checkpoint._CachedTorchDispatchMode",
    "torch.utils.checkpoint._CachingTorchDispatchMode",
)
"""What training uses."""
ACCOUNT = (
    "torch._dynamo.backends.common.aot_autograd",
    "torch._functorch._aot_autograd.utils.make_boxed_func",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "torch._inductor.decomposition.select_decomp_table",
    "torch._ops.OpOverload",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.distributed._tools.fake_collectives",
    "torch.nn.attention.varlen._varlen_attn._init_fn",
    "torch.ops.aten._local_scalar_dense",
    "torch.ops.aten._to_copy",
    "torch.ops.aten._unsafe_view",
    "torch.ops.aten.mm.default._overloadpacket",
    "torch.ops.aten.mm.default._schema",
    "torch.utils._python_dispatch.TorchDispatchMode",
)
"""What counting a rank uses beside them."""
WEIGHTS = ("torch.distributed.checkpoint.utils._create_file_view",)
"""What converting weights uses beside them."""
BENCH = ("torch.cuda._sleep",)
"""What measuring a machine's parts uses beside them."""


def check_names(names: Iterable[str]) -> None:
    """Raises EnvironmentProblem with those that this torch lacks."""
    if missing := list(missing_names(names)):
        raise EnvironmentProblem(
            f"torch {torch.__version__} lacks what llmb uses of it: {', '.join(missing)}",
            where=str(torch.__file__),
            do=f"use a version that llmb was tried with: {' or '.join(TRIED)}",
        )


def missing_names(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        try:
            found(name)
        except (ImportError, AttributeError):
            yield name


def found(name: str) -> object:
    """What a name with dots stands for. Raises ImportError or AttributeError if there is none."""
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
    """Why results with this version of torch say so; None for one of ``TRIED``."""
    if ".".join(version.split(".")[:2]) in TRIED:
        return None
    return f"torch {version} was never tried with this version of llmb, only {' and '.join(TRIED)}"
