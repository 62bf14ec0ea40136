# SPDX-License-Identifier: Apache-2.0
"""Whether ``llmb bench gemm`` reaches what a plain loop of torch reaches on this CPU.

Both compute the same products in one process with one thread, in turn: the product that the engine times, and torch's
product of the same shape, each in CPU time, which other programs disturb less. Target: the ratio of their times is at
most 1.03, as the median over all shapes and dtypes.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.support import option_parser, print_result, read_options
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.engine.device import exact_fp32
from llmb.nodes.bench.device_bench import gemm_cases
from llmb.nodes.bench.protocol import CaseList, ProductCase, ProductDtype
from llmb.nodes.bench.worker.measure_device import DTYPES, PreparedCall, product, timed

TARGET = 1.03
CALLS = 5
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over pairs; CPU seconds of one product."""

    case: str
    plain_s: float
    llmb_s: float
    ratio: float
    """Median over the pairs."""


def main() -> None:
    options = read_options(option_parser(__doc__, pairs=(15, "bursts of each")), pairs=2)
    torch.set_num_threads(1)
    exact_fp32()
    found = [compare(case, options.pairs) for case in cases()]
    print_result(found, text(found), as_json=options.json)
    sys.exit(0 if middle(found) <= TARGET else 1)


def cases() -> list[ProductCase]:
    """Of a small recipe, and a square one, in the dtypes that a CPU multiplies itself."""
    recipe = resolve(
        Catalogue(), Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", overrides=Overrides(mbs=8))
    )
    dtypes: tuple[ProductDtype, ...] = ("fp32", "bf16")
    works = [asked.case.work for asked in gemm_cases(recipe, dtypes, "cpu", 0)]
    return [work for work in works if isinstance(work, ProductCase)]


def compare(case: ProductCase, pairs: int) -> Comparison:
    """A burst of each in turn."""
    llmb, plain = product(case, CPU), plain_product(case)
    both = [(burst(plain), engine_burst(llmb)) for _ in range(pairs)]
    return Comparison(
        case=f"{case.training_pass} {case.m} x {case.k} x {case.n} {case.dtype}",
        plain_s=statistics.median(pair[0] for pair in both),
        llmb_s=statistics.median(pair[1] for pair in both),
        ratio=statistics.median(pair[1] / pair[0] for pair in both),
    )


def plain_product(case: ProductCase) -> Callable[[], object]:
    """What a layer of torch computes in this pass."""
    dtype, (m, k, n) = DTYPES[case.dtype], (case.m, case.k, case.n)
    x, w, g = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype), torch.randn(m, n, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: torch.nn.functional.linear(x, w),
        "input_gradient": lambda: torch.mm(g, w),
        "weight_gradient": lambda: torch.mm(g.t(), x),
    }
    return calls[case.training_pass]


def burst(call: Callable[[], object]) -> float:
    """Median CPU time of a few calls after a warm-up."""
    call()
    times = []
    for _ in range(CALLS):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def engine_burst(call: Callable[[], object]) -> float:
    """The same, as the engine times it, on the clock of CPU time."""

    def seconds() -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    job = CaseList(device="cpu", cases=(), warm_ups=1, least_repeats=CALLS, most_repeats=CALLS)
    found = timed(PreparedCall(call, seconds=seconds), CPU, job, None).seconds
    assert found is not None
    return found


def middle(found: list[Comparison]) -> float:
    return statistics.median(one.ratio for one in found)


def text(found: list[Comparison]) -> str:
    lines = [
        f"one thread, torch {torch.__version__}, medians of CPU time of one product",
        f"{'product':<44}{'torch us':>10}{'llmb us':>10}{'ratio':>8}",
    ]
    lines += [f"{one.case:<44}{1e6 * one.plain_s:>10.1f}{1e6 * one.llmb_s:>10.1f}{one.ratio:>8.3f}" for one in found]
    largest = max(one.ratio for one in found)
    lines.append(f"median ratio: {middle(found):.3f} (target: at most {TARGET:g}), largest {largest:.3f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
