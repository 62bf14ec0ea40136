# SPDX-License-Identifier: Apache-2.0
"""Makes the report that the documentation links, and draws its picture that README shows.

A tiny model is made a quarter slower on purpose after eight runs, which shows unless other work disturbs the machine.
The lines of logs are those that NVIDIA's documents print. Needs the extra ``test`` and a Chromium; takes two minutes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from runpy import run_path

from playwright.sync_api import ViewportSize, sync_playwright

CHECKOUT = Path(__file__).parents[1]
PICTURE, GALLERY = CHECKOUT / "docs" / "report.png", CHECKOUT / "docs" / "gallery.html"
SIZE: ViewportSize = {"width": 1080, "height": 980}
REPEATS, TINY = 8, ("run", "-w", "pretrain_llama3.1")
LOGS = CHECKOUT / "tests" / "data" / "documented_logs"
SMALL = ("-s", "tiny", "--scale", "1", "--gbs", "4", "--seq-len", "64", "--steps", "50", "--window", "10-49", "-q")
FURTHER = (("--scale", "2"), ("--scale", "4"), ("-w", "pretrain_mixtral", "--scale", "2", "--profile"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def llmb(install: Path, *words: str, check: bool = True, slower: bool = False) -> None:
    """With one thread, which other work on the machine disturbs the least."""
    support = run_path(str(CHECKOUT / "tests" / "support" / "slowed_runs.py"))
    delay = support["slowed"](support["Slow"]("compute", pct=25)) if slower else {}
    environ = {**os.environ, "LLMB_INSTALL": str(install), "OMP_NUM_THREADS": "1", **delay}
    subprocess.run([sys.executable, "-m", "llmb", *words], check=check, env=environ, stdout=subprocess.DEVNULL)


def draw(page: Path, picture: Path) -> None:
    """Draw a page. Raises StopIteration if there is no browser."""
    program = next(found for name in BROWSERS if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport=SIZE, color_scheme="light")
        opened.goto(page.as_uri())
        opened.screenshot(path=picture)
        browser.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "runs")
        for number in range(REPEATS + 1):
            llmb(root, *TINY, *SMALL, slower=number == REPEATS)
        for options in FURTHER:
            llmb(root, *TINY, *SMALL, *options)
        llmb(root, *TINY, *SMALL, "--dtype", "bf16", "--lr", "1e38", check=False)  # so that a run has failed
        llmb(root, "report", str(root), str(LOGS), "--gpu-type", "h100", "-o", str(GALLERY), "-q")
    GALLERY.write_text(GALLERY.read_text().replace(f"{CHECKOUT}/", ""))
    draw(GALLERY, PICTURE)


if __name__ == "__main__":
    main()
