# SPDX-License-Identifier: Apache-2.0
"""Writes the schemas of JSON documents that tests hold frozen; refuses to remove or change keys without --breaking."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from json_samples import sample_documents
from json_schemas import schemas
from json_types import Schema

from llmb.catalogue.catalogue import Catalogue

ROOT = Path(__file__).resolve().parents[2]
FROZEN = ROOT / "tests" / "data" / "schemas"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--breaking", action="store_true", help="also remove keys, and change types")
    breaking = parser.parse_args().breaking
    current = current_schemas()
    broken = [text for name, schema in current.items() for text in changes(name, frozen(name), schema)[0]]
    if broken and not breaking:
        sys.exit("\n".join([*broken, "programs of users break; --breaking writes it, and CHANGELOG.md has to say so"]))
    FROZEN.mkdir(parents=True, exist_ok=True)
    for name, schema in current.items():
        lines = (f"  {json.dumps(path)}: {json.dumps(kinds)}" for path, kinds in schema.items())
        file_of(name).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"written: {len(current)} schemas in {FROZEN.relative_to(ROOT)}")


def current_schemas() -> dict[str, Schema]:
    """By document, as the code is now."""
    return schemas(sample_documents(Catalogue()))


def file_of(name: str) -> Path:
    return FROZEN / f"{name.replace(' ', '-')}.json"


def frozen(name: str) -> dict[str, list[str]]:
    """The stored schema; empty for a new document."""
    path = file_of(name)
    return json.loads(path.read_text()) if path.exists() else {}


def changes(
    name: str, before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str]]:
    """In words: what breaks programs that read the document, and what is new."""
    breaks = [f"{name}: {path} is gone" for path in before if path not in after]
    news = [f"{name}: {path} is new" for path in after if path not in before]
    for path in (path for path in after if path in before and set(before[path]) != set(after[path])):
        added = set(after[path]) - set(before[path])
        only_values = set(before[path]) <= set(after[path]) and all(kind.startswith("'") for kind in added)
        text = f"{name}: {path} was {' or '.join(before[path])}, and is {' or '.join(after[path])}"
        (news if only_values else breaks).append(text)
    return breaks, news


if __name__ == "__main__":
    main()
