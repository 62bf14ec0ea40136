# SPDX-License-Identifier: Apache-2.0
"""Prints what is recorded of small functions compiled for a GPU that is not there, as JSON by name."""

import json
import sys

from benchmarks.generated_code.pretend import GPU, fake_tensors, pretend_gpu

ROWS, COLUMNS = 4096, 2048
PROGRAMS = 132
HEADS, HEAD, PAIRS = 8, 128, 32

library = pretend_gpu("NVIDIA H200", 10**11, 60 * 2**20)

import torch  # noqa: E402
from benchmarks.generated_code.capture import Recorder  # noqa: E402
from benchmarks.generated_code.kernels import Kernel, Size, launched  # noqa: E402
from benchmarks.generated_code.summary import Scale, kernel_of  # noqa: E402
from generated_kernels import read_twice, sum_columns, unrolled, written_and_read  # noqa: E402
from torch import Tensor  # noqa: E402

from llmb.engine.kernels.arguments import Rotation  # noqa: E402
from llmb.engine.kernels.rotary import rotate_in_place  # noqa: E402


def one_pass(hidden: Tensor) -> Tensor:
    return hidden.sin()


def extra_pass(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.sin(), hidden.cos()


def slice_of_larger(hidden: Tensor) -> Tensor:
    """Reads a quarter twice, each half at two places, as rotary embeddings do."""
    part = hidden[:, : COLUMNS // 4]
    first, second = part.chunk(2, -1)
    return torch.cat((first - second, second + first), -1)


def row_by_row(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Reduces rows, and casts them."""
    largest = hidden.float().abs().amax(-1, keepdim=True)
    return largest, (hidden.float() / largest).to(torch.float8_e4m3fn)


def row_by_row_transposed(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest, cast = row_by_row(hidden)
    return largest, cast, cast.t().contiguous()


def normalized(hidden: Tensor) -> Tensor:
    """Reads rows in two loops, as they are too long for registers."""
    factor = hidden.float().square().mean(-1, keepdim=True).rsqrt()
    return (hidden * factor).to(hidden.dtype)


def sum_normalized(hidden: Tensor) -> tuple[Tensor, Tensor]:
    total = hidden + 1
    return total, normalized(total)


def own_sums(hidden: Tensor) -> Tensor:
    """In memory that had no values."""
    sums = torch.empty(PROGRAMS, COLUMNS, dtype=torch.float32, device=GPU)
    sum_columns[(PROGRAMS,)](hidden, sums, ROWS, COLUMNS)
    return sums


def earlier_sums(hidden: Tensor) -> Tensor:
    """Which another launch made."""
    sums = own_sums(hidden)
    sum_columns[(PROGRAMS,)](hidden, sums, ROWS, COLUMNS)
    return sums


def rotated_in_place(hidden: Tensor) -> Tensor:
    """A quarter of a tensor."""
    cos, sin = hidden[:, : 2 * PAIRS].float().chunk(2, -1)
    product = hidden.sin()
    rotate_in_place(product, Rotation(cos, sin, interleaved=False), HEADS, HEAD)
    return product


def launches() -> dict[str, dict[str, int]]:
    """Of kernels of [4096, 2048] in bf16, by as many programs as multiprocessors; nothing runs."""
    size = Size(ROWS * COLUMNS * 2, COLUMNS * 2)
    found = {}
    for kernel in (read_twice, written_and_read, unrolled):
        given = {"source": torch.bfloat16, "result": torch.bfloat16, "rows": ROWS, "columns": COLUMNS}
        one = launched(kernel, given, {"source": size, "result": size}, PROGRAMS, 8)
        found[one.name] = {"bytes": one.bytes, "repeated": one.repeated, "in_flight": one.in_flight}
    return found


def beyond_the_cache() -> dict[str, list[float]]:
    scale = Scale(unit=100, cache_bytes=1000)
    kernels = [kernel_of(Kernel("one", 300, repeated=200, in_flight=size), scale) for size in (1000, 1001)]
    return {"u": [each.u for each in kernels], "cached_u": [each.cached_u for each in kernels]}


FUNCTIONS = (
    one_pass,
    extra_pass,
    slice_of_larger,
    row_by_row,
    row_by_row_transposed,
    normalized,
    sum_normalized,
    own_sums,
    earlier_sums,
    rotated_in_place,
)


def main() -> None:
    recorder = Recorder()
    found = {}
    with fake_tensors(), recorder.recording(), torch.no_grad():
        hidden = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=GPU)
        for function in FUNCTIONS:
            before = len(recorder.graphs)
            results = torch.compile(function, dynamic=False)(hidden)
            kernels = [kernel for graph in recorder.graphs[before:] for kernel in graph.kernels]
            found[function.__name__] = {
                "bytes": sum(kernel.bytes for kernel in kernels),
                "kernels": len(kernels),
                "repeated": sum(kernel.repeated for kernel in kernels),
                "in_flight": sum(kernel.in_flight for kernel in kernels),
                "uncoalesced": [
                    [access.direction, access.bytes] for kernel in kernels for access in kernel.uncoalesced
                ],
                "shapes": [list(each.shape) for each in (results if isinstance(results, tuple) else (results,))],
            }
        # Of any number of rows.
        grown = torch.compile(one_pass, dynamic=True)(hidden)
        found["symbolic"] = {"shape": [type(size).__name__ for size in grown.shape], "rows": grown.shape[0]}
    sys.stdout.write(json.dumps(found | launches() | {"beyond_the_cache": beyond_the_cache()}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
