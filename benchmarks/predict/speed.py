# SPDX-License-Identifier: Apache-2.0
"""How long predictions take: one from a shell, ten thousand from a file, and a search."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice, product

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.predict.prediction import default_calibration, predict, predict_rows
from llmb.predict.search import search
from llmb.runs.choices import Choices
from llmb.runs.plan import make_plan

ROWS = 10_000
REPETITIONS = 5
ASKED = ("-w", "pretrain_llama3.1", "-s", "405b", "--scale", "512", "--gpu-type", "h100")


def main() -> None:
    catalogue = Catalogue()
    usual, h100 = default_calibration(catalogue.rates), catalogue.gpus["h100"]
    request = Request(workload="pretrain_llama3.1", size="405b", scale=512, gpu_type="h100", dtype="bf16")
    plan = make_plan(resolve(catalogue, request), Choices(), device="cuda")
    rows = list(islice(_rows(), ROWS))

    def shell(command: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-m", "llmb", command, *ASKED], check=True, capture_output=True)

    def found() -> int:
        return sum(not isinstance(row.found, Exception) for row in predict_rows(catalogue, rows, usual))

    sys.stdout.write(f"of {ROWS:,} rows {found():,} are valid\n")
    cases: dict[str, Callable[[], object]] = {
        "llmb list": lambda: subprocess.run([sys.executable, "-m", "llmb", "list"], check=True, capture_output=True),
        "llmb predict": shell("predict"),
        f"{ROWS:,} rows": found,
        "search for 405b on 512": lambda: search(plan, lambda one: predict(one, h100, usual, catalogue.rates.errors)),
    }
    for name, case in cases.items():
        sys.stdout.write(f"{name:24s} {min(map(_seconds, [case] * REPETITIONS)):.3f} s, the best of {REPETITIONS}\n")


def _rows() -> Iterator[dict[str, str]]:
    """Layouts of 405b on 512 GPUs, valid or not."""
    recipe = {"workload": "pretrain_llama3.1", "size": "405b", "gpu_type": "h100", "scale": "512"}
    sizes = product((4, 8), (4, 8, 16), (1, 2, 4, 8), (1, 2, 4), (1, 2), range(256, 18_000, 256))
    for each in sizes:
        yield recipe | dict(zip(("tp", "pp", "vp", "cp", "mbs", "gbs"), map(str, each), strict=True))


def _seconds(case: Callable[[], object]) -> float:
    began = time.perf_counter()
    case()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
