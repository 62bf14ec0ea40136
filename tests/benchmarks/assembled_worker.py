# SPDX-License-Identifier: Apache-2.0
"""Prints how often each kernel of a step of a model was assembled, by compute capability, as JSON.

Arguments: model, dtype.
"""

import json
import sys
from collections import Counter

from benchmarks.generated_code.measure import GPUS, recipe_of
from benchmarks.generated_code.pretend import pretend_gpu

from llmb.catalogue.records import Dtype

library = pretend_gpu(*GPUS["h200"])

from benchmarks.generated_code.assemble import assembled  # noqa: E402
from benchmarks.generated_code.step import run_step  # noqa: E402


def main(model: str, dtype: str) -> None:
    graphs = run_step(recipe_of(model, Dtype(dtype), "h200")).graphs
    found = {}
    for capability in (90, 100):
        kernels = [each for graph in graphs for each in assembled(graph.code, capability)]
        assert all(size > 0 for _, size in kernels)
        found[capability] = Counter(name for name, _ in kernels)
    sys.stdout.write(json.dumps(found))


main(*sys.argv[1:])
