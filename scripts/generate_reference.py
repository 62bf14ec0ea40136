# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of docs/reference, and sample outputs in others, from the code and the catalogue.

With --check it only lists the stale pages.
"""

import argparse
import sys
from pathlib import Path

from reference_pages.catalogue import catalogue_page
from reference_pages.environment import environment_page
from reference_pages.same import same_page
from reference_pages.samples import picture, with_samples

from llmb.catalogue.load import Catalogue

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
WITH_SAMPLES = (ROOT / "docs" / "tutorial" / "first-run.md",)
PICTURE = ROOT / "docs" / "llmb.svg"
HEADER = "<!-- Written by scripts/generate_reference.py ('make reference'); changes made here are lost. -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name the stale pages")
    check = parser.parse_args().check
    stale = stale_pages(pages())
    for path, text in stale.items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
    sys.exit(int(check and bool(stale)))


def stale_pages(written: dict[Path, str]) -> dict[Path, str]:
    """Pages whose file is missing or differs."""
    return {path: text for path, text in written.items() if not path.exists() or path.read_text() != text}


def pages() -> dict[Path, str]:
    """Every generated page by its file."""
    catalogue = Catalogue()
    texts = {
        "catalogue.md": catalogue_page(catalogue),
        "environment.md": environment_page(),
        "what-is-the-same.md": same_page(catalogue),
    }
    written = {REFERENCE / name: f"{HEADER}\n\n{text.strip()}\n" for name, text in texts.items()}
    samples = {path: with_samples(path.read_text(), catalogue) for path in WITH_SAMPLES}
    return {**written, **samples, PICTURE: picture(catalogue)}


if __name__ == "__main__":
    main()
