# SPDX-License-Identifier: Apache-2.0
"""Prints a page as PDF, with a browser of this machine."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from llmb.errors import EnvironmentProblem
from llmb.tools import ask_program

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
"""Programs with the options of Chromium."""
LIMIT_S = 120.0
OFFLINE = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
"""Neither a window, nor anything from the network."""


def page_pdf(html: str) -> bytes:
    """The page as its style for paper lays it out. Raises EnvironmentProblem if no browser prints it."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    do = "print the page from a browser: --format html"
    if browser is None:
        raise EnvironmentProblem(f"no browser is installed that prints: {', '.join(BROWSERS)}", do=do)
    with TemporaryDirectory() as folder:
        page, printed = Path(folder) / "page.html", Path(folder) / "page.pdf"
        page.write_text(html, encoding="utf-8")
        # Run as root, a browser has no sandbox. All text of others in the page is escaped, and it requests nothing.
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
        options = (*OFFLINE, *sandbox, f"--user-data-dir={folder}/profile", "--no-pdf-header-footer")
        said = ask_program([browser, *options, f"--print-to-pdf={printed}", page.as_uri()], LIMIT_S)
        if said.problem or not printed.exists():
            raise EnvironmentProblem(f"the page was not printed: {said.problem or 'the browser wrote nothing'}", do=do)
        return printed.read_bytes()
