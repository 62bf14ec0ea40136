# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels written in Triton for a GPU on a machine without one: the launches of a function, not run.

Triton has the assembler of CUDA with it.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ENOUGH_IN_FLIGHT = 36_000
"""Bytes of a multiprocessor, by Little's law: 4.8 TB/s of an H200, 1 us until what is loaded arrives, 132 of them."""
LOAD = r"ld\.global[\w.:]*"


class Compiled(NamedTuple):
    """What one launch needs on a GPU."""

    name: str
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread, written to and read from memory for want of registers."""
    shared: int
    """Bytes of shared memory of a program."""
    conversions: int
    """How often a tensor changes threads, through shared memory."""
    loads: list[int]
    """Bytes that a thread loads at a time, for each load from memory."""
    stores: list[int]
    in_flight: int
    """Bytes that the programs of a multiprocessor can wait for at a time; see ``in_flight``."""


class FakeDriver:
    """As of a GPU of compute capability 9.0 (``capability`` 90) on which nothing is launched."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """A different one for each, because compiled kernels are cached by device."""
        return self.capability

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch, cache: Path, capability: int) -> Iterator[list[Any]]:
    """Within it launches of kernels, with tensors of the CPU, are only compiled, and the results are listed."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []
    run: Callable[..., Any] = JITFunction.run

    def compiled(kernel: Any, *arguments: object, **options: Any) -> None:
        kernels.append(run(kernel, *arguments, **{**options, "warmup": True}))

    with monkeypatch.context() as patched:
        patched.setenv("TRITON_CACHE_DIR", str(cache))
        patched.setattr(JITFunction, "run", compiled)
        patched.setattr(driver, "_active", FakeDriver(capability))
        yield kernels


def resources(kernel: Any, folder: Path) -> Compiled:
    """What the assembler says about a kernel that ``compiling`` listed."""
    ptx, capability = kernel.asm["ptx"], kernel.metadata.target.arch
    source = folder / f"{kernel.metadata.name}.ptx"
    source.write_text(ptx)
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target
    binary = f"{source}.cubin"
    command = [assembler(capability), "-v", f"--gpu-name={target[1]}", str(source), "-o", binary]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert not undefined(binary), "the assembler lost a value"
    registers = int(found(r"Used (\d+) registers", said))
    return Compiled(
        kernel.metadata.name,
        registers,
        int(found(r"(\d+) bytes spill stores", said)),
        kernel.metadata.shared,
        kernel.asm["ttgir"].count("ttg.convert_layout"),
        widths(LOAD, ptx),
        widths(r"st\.global[\w.:]*", ptx),
        in_flight(ptx, registers, kernel.metadata.shared, kernel.metadata.num_warps),
    )


def in_flight(ptx: str, registers: int, shared: int, warps: int) -> int:
    """Bytes of loads of 16 bytes, of all programs that fit on a multiprocessor of compute capability 9.0 or 10.0.

    Of a program those between two branches, nothing of which depends on what they load; at most, as the assembler may
    put a use between them. Registers are allocated by 8 of a thread, and 1 KB of shared memory of a program is reserved
    (CUDA C++ Programming Guide, compute capabilities).
    """
    programs = min(64 // warps, 65536 // (-(-registers // 8) * 8 * 32 * warps), 233472 // (shared + 1024))
    parts = re.split(r"^\$L__BB\w+:|^.*\bbra\b.*$", ptx, flags=re.MULTILINE)
    most = max(sum(width for width in widths(LOAD, part) if width == 16) for part in parts)
    return programs * 32 * warps * most


def assembler(capability: int) -> str:
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    return str(tool.path)


def undefined(binary: str) -> list[str]:
    """The instructions that compute with a value that nothing wrote: the assembler names R1 for it.

    The assembler of CUDA 12.8, which Triton 3.6 and 3.7 bring along, drops values of casts to FP8 in some kernels. What
    only fills the unused half of a register (PRMT, F2FP with MERGE_C) is as it should be.
    """
    from triton import knobs

    listed = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-sass", binary], check=True, capture_output=True, text=True
    ).stdout
    code = [re.sub(r"/\*.*?\*/", "", line).strip() for line in listed.splitlines()]
    return [
        line
        for line in code
        if re.search(r"[ |,~-]R1\b", line) and not re.match(r"(@\S+ )?(PRMT|F2FP|LDC R1|MOV R1)", line)
    ]


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def widths(pattern: str, ptx: str) -> list[int]:
    """Bytes of each instruction that matches, such as ``ld.global.v4.b32``."""
    names = [name for name in re.findall(pattern, ptx) if not name.endswith("acquire")]
    return [int(found(r"\.b(\d+)", name)) // 8 * int((re.search(r"\.v(\d)", name) or "11")[1]) for name in names]
