# SPDX-License-Identifier: Apache-2.0
"""Checks every file of a user's catalogue; other commands read only the files that they need."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from llmb.catalogue.catalogue import Catalogue, Published
from llmb.catalogue.data_files import CatalogueError
from llmb.catalogue.resolve import sizes_of

READERS: Mapping[str, Callable[[Catalogue, str], object]] = {
    "hardware.yaml": lambda catalogue, _: catalogue.gpus,
    "documents.yaml": lambda catalogue, _: catalogue.documents,
    "models": lambda catalogue, name: catalogue.families[name],
    "workloads": lambda catalogue, name: catalogue.workloads[name],
    "expectations": lambda catalogue, name: catalogue.published[name],
}
"""Readers of the parts of a catalogue, by file or folder; a part precedes the parts that need it."""
VALID = ", ".join(name if name.endswith(".yaml") else f"{name}/NAME.yaml" for name in READERS)


class UserFile(NamedTuple):
    """A file, relative to the user's folder, and its problems."""

    file: str
    problems: tuple[str, ...]


def check_user_files(catalogue: Catalogue, folder: Path) -> list[UserFile]:
    """Return the files in the user's folder, without hidden files, each with its own problems."""
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if not path.is_dir()]
    order = {name: place for place, name in enumerate(READERS)}
    found: list[UserFile] = []
    for path in sorted(paths, key=lambda path: order.get(path.parts[0], len(order))):
        if not any(part.startswith(".") for part in path.parts):
            known = {problem for each in found for problem in each.problems}
            problems = (problem for problem in _problems(catalogue, folder, path) if problem not in known)
            found.append(UserFile(path.as_posix(), tuple(problems)))
    return found


def _problems(catalogue: Catalogue, folder: Path, path: Path) -> Iterator[str]:
    name = path.parts[0]
    is_listed = name in READERS and len(path.parts) == 2 - name.endswith(".yaml") and path.suffix == ".yaml"
    if not is_listed:
        yield f"{folder / path}: no command reads a file of this name; valid: {VALID}"
        return
    try:
        content = READERS[name](catalogue, path.stem)
        for figure in content.figures if isinstance(content, Published) else ():
            known = figure.workload in catalogue.workloads
            if not known or figure.size not in sizes_of(catalogue.workloads[figure.workload]):
                yield f"{folder / path}: there is no recipe {figure.workload} {figure.size} for its figures"
    except CatalogueError as error:
        yield from error.problems
