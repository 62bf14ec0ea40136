# SPDX-License-Identifier: Apache-2.0
"""Prints the catalogue beside the sources of the published runs: every item is equal, or named as different.

CHECKOUTS is a folder with one clone (also a bare one) per repository: dgxc-benchmarking, NeMo, Megatron-LM. Files are
read at the commits that sources.yaml names, as text; nothing is imported or run. A new release is added there.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from reference_pages.markdown import table

from llmb.catalogue.catalogue import Catalogue, job_defaults
from llmb.catalogue.resolve import Request, resolve
from llmb.engine.precision.scaling import HISTORY_LENGTH

SOURCES = Path(__file__).with_name("sources.yaml")
COLUMNS = ("item", "published run", "llmb's catalogue", "result", "read in")
Value: TypeAlias = str | int | float | bool | None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Reading(Strict):
    """One item: where it stands in a source, and where here; sources.yaml explains the fields."""

    item: str
    places: tuple[str, ...] = Field(default=(), alias="in")
    field: tuple[str, ...] = ()
    key: str | None = None
    assigned: str | None = None
    argument: str | None = None
    text: str | None = None
    stated: int | None = None
    source: str | None = None
    words: Mapping[str, Value] = {}
    quotient: tuple[str, str] | None = None
    plus: int = 0
    padded: bool = False
    llmb: str | None = None
    same_as: Value = Field(default=None, alias="is")


class RecipeName(Strict):
    workload: str
    size: str
    release: str
    gpu_type: str
    dtype: str
    scale: int


class CheckedRecipe(Strict):
    recipe: RecipeName
    revisions: Mapping[str, str]
    readings: tuple[str, ...]
    names: Mapping[str, str] = {}
    different: Mapping[str, str] = {}


class Sources(Strict):
    repositories: Mapping[str, str]
    readings: Mapping[str, tuple[Mapping[str, JsonValue], ...]]
    recipes: tuple[CheckedRecipe, ...]


@dataclass(frozen=True)
class Item:
    name: str
    theirs: str
    ours: str
    place: str
    problem: str | None
    """Why the check fails; None where both are equal, or where the difference is named."""
    named: str | None


class UnreadableError(Exception):
    """A source has no such file, class, field or line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, metavar="CHECKOUTS")
    parser.add_argument(
        "--sources", type=Path, default=SOURCES, help="what to compare (default: sources.yaml beside the script)"
    )
    arguments = parser.parse_args()
    sources = read_sources(arguments.sources)
    checked = {
        title(entry): check(sources, entry, Files(arguments.checkouts, sources, entry)) for entry in sources.recipes
    }
    for name, items in checked.items():
        rows = [[one.name, one.theirs, one.ours, one.problem or one.named or "equal", one.place] for one in items]
        print(f"## {name}\n\n{table(COLUMNS, rows)}\n")
    items = [item for of_recipe in checked.values() for item in of_recipe]
    wrong, named = sum(item.problem is not None for item in items), sum(item.named is not None for item in items)
    print(f"{len(items)} items: {len(items) - wrong - named} equal, {named} different and named, {wrong} wrong")
    sys.exit(int(wrong > 0))


def read_sources(path: Path) -> Sources:
    return Sources.model_validate(yaml.safe_load(path.read_text()))


def title(entry: CheckedRecipe) -> str:
    return f"{entry.recipe.workload} {entry.recipe.size}, {entry.recipe.release}"


def check(sources: Sources, entry: CheckedRecipe, files: "Files") -> list[Item]:
    ours = our_values(entry)
    items = [compare(reading, entry, files, ours) for reading in readings(sources, entry)]
    unknown = set(entry.different) - {item.name for item in items}
    return items + [
        Item(name, "", "", "sources.yaml", "named as different, but not compared", None) for name in sorted(unknown)
    ]


def readings(sources: Sources, entry: CheckedRecipe) -> Iterator[Reading]:
    names = {**entry.names, **entry.revisions}
    for group in entry.readings:
        for raw in sources.readings[group]:
            yield Reading.model_validate({key: filled(value, names) for key, value in as_lists(raw).items()})


def as_lists(raw: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {key: [value] if key in ("in", "field") and isinstance(value, str) else value for key, value in raw.items()}


def filled(value: JsonValue, names: Mapping[str, str]) -> JsonValue:
    """The value with its {names} replaced; other braces, as in regular expressions, stay."""
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), value)
    return [filled(item, names) for item in value] if isinstance(value, list) else value


def our_values(entry: CheckedRecipe) -> JsonValue:
    catalogue = Catalogue()
    recipe = resolve(catalogue, Request(**dict(entry.recipe)))
    return {
        "recipe": recipe.model_dump(mode="json"),
        "job": job_defaults(catalogue, recipe).model_dump(mode="json"),
        "engine": {"fp8_history": HISTORY_LENGTH},
    }


def compare(reading: Reading, entry: CheckedRecipe, files: "Files", ours: JsonValue) -> Item:
    place = ", ".join(files.described(where) for where in reading.places[:1]) or reading.source or ""
    expected = ours_of(reading, ours)
    try:
        theirs = theirs_of(reading, files, ours)
    except UnreadableError as error:
        return Item(reading.item, "", shown(expected), place, str(error), None)
    named = entry.different.get(reading.item)
    equal = shown(theirs) == shown(expected)  # variables of the environment are words
    problem = None
    if equal and named:
        problem = f"named as different, but both are {shown(expected)}"
    elif not equal and not named:
        problem = f"{shown(theirs)} there, {shown(expected)} here"
    return Item(reading.item, shown(theirs), shown(expected), place, problem, None if equal else named)


def ours_of(reading: Reading, ours: JsonValue) -> JsonValue:
    return reading.same_as if reading.llmb is None else looked_up(ours, reading.llmb)


def theirs_of(reading: Reading, files: "Files", ours: JsonValue) -> Value:
    value = reading.stated if reading.stated is not None else files.read(reading)
    value = reading.words.get(str(value), value)
    if value is None and reading.quotient:
        above, below = (number_at(ours, path) for path in reading.quotient)
        return above / below
    if reading.padded and isinstance(value, int):
        multiple = 128 * int(number_at(ours, "recipe.layout.tp"))
        return -(-(value + reading.plus) // multiple) * multiple
    return value


def number_at(ours: JsonValue, path: str) -> float:
    value = looked_up(ours, path)
    assert isinstance(value, int | float), path
    return value


def looked_up(ours: JsonValue, path: str) -> JsonValue:
    """The value at a dotted path; an entry of a list is found by its ``key`` or ``name``, which may have dots."""
    if not path or ours is None:
        return ours
    choices = ours if isinstance(ours, Mapping) else dict(named_entries(ours))
    for name, value in choices.items():
        if path == name or path.startswith(f"{name}."):
            return looked_up(value, path[len(name) + 1 :])
    raise KeyError(f"the catalogue has no {path}; it has {', '.join(choices)}")


def named_entries(entries: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    assert isinstance(entries, list), entries
    for entry in entries:
        assert isinstance(entry, dict), entry
        yield str(entry.get("key", entry.get("name"))), entry


def shown(value: JsonValue) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


class Files:
    """The sources of one recipe, at its revisions."""

    def __init__(self, checkouts: Path, sources: Sources, entry: CheckedRecipe) -> None:
        self._folders = {name: checkouts / folder for name, folder in sources.repositories.items()}
        self._revisions = entry.revisions

    def described(self, place: str) -> str:
        repository, _, path = place.partition(":")
        return f"{self._folders[repository].name} {self._revisions[repository][:8]} {path}"

    def text(self, place: str) -> str:
        repository, _, path = place.partition(":")
        return blob(self._folders[repository], self._revisions[repository], path)

    def read(self, reading: Reading) -> Value:
        if reading.field:
            trees = [parsed(self.text(place)) for place in reading.places]
            values = [field_value(trees, *path.split(".")) for path in reading.field]
            return values[0] if len(values) == 1 else ", ".join(map(str, values))
        text = self.text(reading.places[0])
        if reading.key is not None:
            return key_value(yaml.safe_load(text), reading.key)
        if reading.text is not None:
            found = re.search(reading.text, text)
            if found is None:
                raise UnreadableError(f"no text matches {reading.text}")
            return int(found[1]) if found[1].isdecimal() else number_or_text(found[1])
        function, _, name = (reading.assigned or reading.argument or "").rpartition(":")
        tree = function_of(parsed(text), function) if function else parsed(text)
        values = list(assigned_values(tree, name) if reading.assigned else argument_values(tree, *name.rsplit(".", 1)))
        if not values:
            raise UnreadableError(f"no {name}" + (f" in {function}" if function else ""))
        return values[-1]


@cache
def blob(folder: Path, revision: str, path: str) -> str:
    """Text of a file at a revision; neither filters nor hooks of the repository run."""
    command = ["git", "-C", str(folder), "cat-file", "blob", f"{revision}:{path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnreadableError(done.stderr.strip() or f"git has no {path} at {revision}")
    return done.stdout


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def key_value(document: JsonValue, key: str) -> Value:
    for name in key.split("."):
        if not isinstance(document, Mapping) or name not in document:
            raise UnreadableError(f"no key {key}")
        document = document[name]
    return document if isinstance(document, str | int | float | None) else str(document)


def function_of(tree: ast.Module, name: str) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise UnreadableError(f"no function {name}")


def field_value(trees: Sequence[ast.Module], name: str, field: str) -> Value:
    """The default of a dataclass's field, its own or the nearest base's; None where no base has it."""
    classes = {node.name: node for tree in reversed(trees) for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        raise UnreadableError(f"no class {name}")
    waiting = [name]
    while waiting:
        node = classes[waiting.pop(0)]
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == field and statement.value:
                return literal(statement.value)
        waiting += [base for base in map(ast.unparse, node.bases) if base in classes]
    return None


def assigned_values(tree: ast.AST, target: str) -> Iterator[Value]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == target:
            yield literal(node.value)


def argument_values(tree: ast.AST, function: str, name: str) -> Iterator[Value]:
    """Defaults of a parameter, and keyword arguments of calls, also as ``run.Config(function, name=...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            positional = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            yield from (
                literal(value) for arg, value in zip(positional, node.args.defaults, strict=True) if arg.arg == name
            )
        if isinstance(node, ast.Call):
            called = [ast.unparse(word).rpartition(".")[2] for word in (node.func, *node.args[:1])]
            if function in called:
                yield from (literal(word.value) for word in node.keywords if word.arg == name)


def literal(node: ast.expr) -> Value:
    """The value of a constant; of anything else its source text, of a default_factory what it makes."""
    if isinstance(node, ast.Call) and node.keywords and isinstance(node.keywords[0].value, ast.Lambda):
        node = node.keywords[0].value.body
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
    return value if isinstance(value, str | int | float | None) else ast.unparse(node)


def number_or_text(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


if __name__ == "__main__":
    main()
