# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.generated_code.measure MODEL DTYPE GPU_TYPE RANKS``: one case as JSON, in its own process.

Only this process pretends to have a GPU.
"""

import sys
from typing import NamedTuple

from benchmarks.engine.cases import GPU_MODELS, TINY_MODELS
from benchmarks.generated_code.pretend import pretend_gpu
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Dtype, Recipe
from llmb.catalogue.resolve import Overrides, Request, resolve


class Gpu(NamedTuple):
    """As its driver describes it."""

    name: str
    memory_bytes: int
    cache_bytes: int


GPUS = {"h200": Gpu("NVIDIA H200", 150_754_820_096, 60 * 2**20),
        "h100": Gpu("NVIDIA H100 80GB HBM3", 85_029_158_912, 50 * 2**20)}  # fmt: skip
TINY_TOKENS = 1024


def recipe_of(name: str, dtype: Dtype, gpu_type: str) -> Recipe:
    """The proxy of the comparison, or with a prefix ``tiny-`` a model of the same parts for tests."""
    tiny = name.removeprefix("tiny-")
    if tiny != name:
        workload, size = TINY_MODELS[tiny]
        overrides = Overrides(seq_len=TINY_TOKENS, mbs=1)
        request = Request(workload=workload, size=size, dtype=dtype, gpu_type="cpu", scale=1, overrides=overrides)
    else:
        workload, size = GPU_MODELS[name]
        request = Request(workload=workload, size=size, dtype=dtype, gpu_type=gpu_type, scale=1)
    return resolve(Catalogue(), request)


def main() -> None:
    name, dtype, gpu_type, ranks = sys.argv[1:5]
    gpu = GPUS[gpu_type]
    library = pretend_gpu(*gpu)
    from benchmarks.generated_code.step import run_step  # only now: the engine looks for a GPU when it is imported
    from benchmarks.generated_code.summary import case_of

    found = run_step(recipe_of(name, Dtype(dtype), gpu_type), int(ranks))
    sys.stdout.write(case_of(found, name, gpu_type, gpu.cache_bytes).model_dump_json())
    sys.stdout.flush()
    del library


if __name__ == "__main__":
    main()
