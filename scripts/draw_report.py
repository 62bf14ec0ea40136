# SPDX-License-Identifier: Apache-2.0
"""Draws the picture of a report that README shows: of six runs of the tiny Llama 3.1.

Needs the extra ``test`` and a Chromium; takes two minutes on two cores.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright

PICTURE = Path(__file__).parents[1] / "docs" / "report.png"
SIZE: ViewportSize = {"width": 1080, "height": 980}
RECIPE = ("-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "1", "--steps", "60")
LABELS = ("before", "after")
REPEATS = 3
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def llmb(install: Path, *words: str) -> None:
    command = [sys.executable, "-m", "llmb", *words]
    subprocess.run(command, check=True, env={**os.environ, "LLMB_INSTALL": str(install)}, stdout=subprocess.DEVNULL)


def draw(page: Path, picture: Path) -> None:
    """Raises StopIteration if there is no browser."""
    program = next(found for name in BROWSERS if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport=SIZE, color_scheme="light")
        opened.goto(page.as_uri())
        opened.screenshot(path=picture)
        browser.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, page = Path(folder, "root"), Path(folder, "report.html")
        for label in LABELS * REPEATS:  # in turn, so that drift over time affects both
            llmb(root, "run", *RECIPE, "--label", label, "-q")
        before, after = LABELS
        llmb(root, "report", after, "--against", before, "-o", str(page), "-q")
        draw(page, PICTURE)


if __name__ == "__main__":
    main()
