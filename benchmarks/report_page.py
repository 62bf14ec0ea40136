# SPDX-License-Identifier: Apache-2.0
"""How long ``llmb report`` takes for many runs, and how long a browser takes to open the page and to sort it.

The runs are recorded ones of ten recipes, 50 steps each. The browser is Chromium; without it, only the page is made.
"""

import argparse
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent.parent / "tests" / "support"
PR_SET_CHILD_SUBREAPER = 36
RECIPES = [("8b", scale, dtype) for scale in (8, 16, 32, 64) for dtype in ("bf16", "fp8")]
RECIPES += [("70b", 64, "bf16"), ("70b", 64, "fp8")]
SORT = """() => {
  const button = [...document.querySelectorAll('#runs-table thead button')].find((one) => one.textContent === 'step s');
  const began = performance.now();
  button.click();
  document.body.getBoundingClientRect();
  return (performance.now() - began) / 1000;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="(default: 2000, which takes a minute to prepare)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        record_runs(root / "workloads" / "pretrain_llama3.1" / "experiments" / "e", arguments.runs)
        found = {"runs": arguments.runs, **made(root), **opened(root / "report.html")}
    lines = (f"{name}: {value if isinstance(value, int) else f'{value:.3g}'}" for name, value in found.items())
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(lines))


def record_runs(below: Path, count: int) -> None:
    """A folder for each run, a level deeper for each recipe, so that no folder is listed again and again."""
    sys.path.insert(0, str(SUPPORT))
    recorded: Any = import_module("recorded_runs")
    records = [recorded.gpu_record(size=size, scale=scale, dtype=dtype) for size, scale, dtype in RECIPES]
    for number in range(count):
        times_s = recorded.times_around(10 + number * 7919 % 100 / 500)
        path = recorded.write_run(below / "new", records[number % len(records)], times_s)
        path.parent.rename(below / f"run_{number}")


def made(root: Path) -> dict[str, float | int]:
    """Seconds, peak memory and size of making the page."""
    command = [sys.executable, "-m", "llmb", "report", "-q", "-o", str(root / "report.html")]
    become_reaper()
    began = time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, "LLMB_INSTALL": str(root)})
    took_s = time.perf_counter() - began
    wait_for_all()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    size = (root / "report.html").stat().st_size
    return {"made_s": took_s, "cpu_s": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss // 1024, "bytes": size}


def become_reaper() -> None:
    """The processes that draw are of this one when their own parent has ended, so that their use counts."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_all() -> None:
    with suppress(ChildProcessError):
        while True:
            os.wait()


def opened(page: Path) -> dict[str, float]:
    """Seconds until the page is loaded, and until its runs are sorted; empty without a browser."""
    browser = shutil.which("chromium")
    if browser is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"]).new_page()
        window.goto(page.as_uri())
        loaded_ms = window.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        return {"opened_s": loaded_ms / 1000, "sorted_s": window.evaluate(SORT)}


if __name__ == "__main__":
    main()
