# SPDX-License-Identifier: Apache-2.0
"""Makes the report that the documentation links, and draws the picture of one that README shows, of tiny models.

Needs the extra ``test`` and a Chromium; takes three minutes on two cores.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright

CHECKOUT = Path(__file__).parents[1]
PICTURE, GALLERY = CHECKOUT / "docs" / "report.png", CHECKOUT / "docs" / "gallery.html"
SIZE: ViewportSize = {"width": 1080, "height": 980}
RECIPE = ("-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "1", "--steps", "60")
SMALL = ("-s", "tiny", "--gbs", "4", "--seq-len", "64", "--steps", "30")
CAMPAIGN = (
    ("-w", "pretrain_llama3.1", "--scale", "1", "--repeats", "5"),
    ("-w", "pretrain_llama3.1", "--scale", "2"),
    ("-w", "pretrain_llama3.1", "--scale", "4"),
    ("-w", "pretrain_mixtral", "--scale", "2", "--profile"),
    ("-w", "finetune_llama3", "--scale", "1", "--synthetic"),
)
NOT_FINITE = ("-w", "pretrain_qwen3", "--scale", "1", "--lr", "1e38")
"""Ends with an error, so that the report has a run that failed."""
LABELS = ("before", "after")
REPEATS = 3
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def llmb(install: Path, *words: str, check: bool = True) -> None:
    command = [sys.executable, "-m", "llmb", *words]
    subprocess.run(command, check=check, env={**os.environ, "LLMB_INSTALL": str(install)}, stdout=subprocess.DEVNULL)


def draw(page: Path, picture: Path) -> None:
    """Raises StopIteration if there is no browser."""
    program = next(found for name in BROWSERS if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport=SIZE, color_scheme="light")
        opened.goto(page.as_uri())
        opened.screenshot(path=picture)
        browser.close()


def make_picture(folder: Path) -> None:
    root, page = folder / "compared", folder / "report.html"
    for label in LABELS * REPEATS:  # in turn, so that drift over time affects both
        llmb(root, "run", *RECIPE, "--label", label, "-q")
    before, after = LABELS
    llmb(root, "report", after, "--against", before, "-o", str(page), "-q")
    draw(page, PICTURE)


def make_gallery(folder: Path) -> None:
    root = folder / "gallery"
    for options in CAMPAIGN:
        llmb(root, "run", *options, *SMALL, "-q")
    llmb(root, "run", *NOT_FINITE, *SMALL, "-q", check=False)
    llmb(root, "report", "-o", str(GALLERY), "-q")
    GALLERY.write_text(GALLERY.read_text().replace(f"{CHECKOUT}/", ""))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_picture(Path(folder))
        make_gallery(Path(folder))


if __name__ == "__main__":
    main()
