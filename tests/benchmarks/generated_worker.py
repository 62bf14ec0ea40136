# SPDX-License-Identifier: Apache-2.0
"""Prints what is recorded of small functions compiled for a GPU that is not there, as JSON by name."""

import json
import sys

from benchmarks.generated_code.pretend import GPU, fake_tensors, pretend_gpu

ROWS, COLUMNS = 4096, 2048

library = pretend_gpu("NVIDIA H200", 10**11)

import torch  # noqa: E402
from benchmarks.generated_code.capture import Recorder  # noqa: E402
from torch import Tensor  # noqa: E402


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


def main() -> None:
    recorder = Recorder()
    found = {}
    with fake_tensors(), recorder.recording(), torch.no_grad():
        hidden = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=GPU)
        for function in (one_pass, extra_pass, slice_of_larger, row_by_row, row_by_row_transposed):
            before = len(recorder.graphs)
            results = torch.compile(function, dynamic=False)(hidden)
            kernels = [kernel for graph in recorder.graphs[before:] for kernel in graph.kernels]
            found[function.__name__] = {
                "bytes": sum(kernel.bytes for kernel in kernels),
                "kernels": len(kernels),
                "uncoalesced": [
                    [access.direction, access.bytes] for kernel in kernels for access in kernel.uncoalesced
                ],
                "shapes": [list(each.shape) for each in (results if isinstance(results, tuple) else (results,))],
            }
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
