# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/catalogue.md, and tables and sample outputs in other pages, from the code and the catalogue."""

import re
from collections.abc import Mapping
from pathlib import Path

from reference_pages.blocks import all_blocks
from reference_pages.catalogue import catalogue_page

from llmb.catalogue.catalogue import Catalogue

ROOT = Path(__file__).resolve().parent.parent
CATALOGUE = ROOT / "docs" / "reference" / "catalogue.md"
HEADER = "<!-- Written by scripts/generate_reference.py ('make reference'); changes made here are lost. -->"
WITH_BLOCKS = ("docs/tutorial/first-run.md", "docs/reference/what-is-the-same.md", "docs/reference/environment.md")
BLOCK = re.compile(r"(?<=<!-- generated: )([\w.-]+) -->\n.*?(?=\n<!-- end -->)", re.DOTALL)


def main() -> None:
    for path, text in pages().items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")


def pages() -> dict[Path, str]:
    """Every page that is generated, or has blocks that are."""
    catalogue = Catalogue()
    blocks = all_blocks(catalogue)
    with_new = {ROOT / name: with_blocks((ROOT / name).read_text(), blocks) for name in WITH_BLOCKS}
    return {CATALOGUE: f"{HEADER}\n\n{catalogue_page(catalogue)}\n", **with_new}


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """Replace the text between ``<!-- generated: NAME -->`` and ``<!-- end -->``."""
    return BLOCK.sub(lambda block: f"{block[1]} -->\n{blocks[block[1]]}", page)


if __name__ == "__main__":
    main()
