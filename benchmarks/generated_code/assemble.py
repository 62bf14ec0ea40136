# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels in generated code, those of the engine among them, down to the machine code of a GPU.

Triton has the assembler of CUDA with it. Nothing is loaded or run.
"""

import re
from collections.abc import Iterator
from typing import Any

import triton
from torch._inductor.codecache import PyCodeCache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''\n(.*?)'''", re.DOTALL)
WARP = 32


def assembled(code: str, capability: int) -> Iterator[tuple[str, int]]:
    """Name and bytes of machine code of each kernel in ``code``, for a compute capability such as 90.

    With each of the sizes of blocks that are tried on a GPU. Raises what Triton does if it cannot compile one.
    """
    for name, source in KERNEL.findall(code):
        tried: Any = getattr(PyCodeCache.load(source), name)
        for config in tried.configs:
            given = tried._create_compile_meta(config)
            kernel = ASTSource(tried.fn, given["signature"], given["constants"], given["configs"][0])
            options = tried._create_compile_options(config, given)
            binary = triton.compile(kernel, target=GPUTarget("cuda", capability, WARP), options=options)
            yield name, len(binary.asm["cubin"])
