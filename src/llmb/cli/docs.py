# SPDX-License-Identifier: Apache-2.0
"""``llmb docs``: the documentation, which is part of every installation, and the JSON Schemas of stored files."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, reduce
from importlib import import_module
from itertools import groupby, pairwise
from math import isfinite
from operator import or_
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from llmb.base.errors import UsageError, unknown
from llmb.base.missing import Missing
from llmb.base.record import ReasonedRecord
from llmb.cli.common import Json
from llmb.reports.output import print_markdown, print_output
from llmb.reports.table import rows_table

FOLDER = Path(__file__).parents[1] / "docs"
_TASK = re.compile(r"^## (.*)$((?:.|\n(?!## ))*)", re.MULTILINE)
_LISTED = re.compile(r"^- \[.*?\]\((.*?)\):((?:.|\n(?!-|\n))*)", re.MULTILINE)
"""An entry in the list of pages: the file and the subject."""
MOST_PAGES = 8
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class DocPage:
    name: str
    """The name of the page's file without the suffix; unique across folders."""
    task: str
    """The heading above the page in the list of pages."""
    title: str
    about: str
    path: Path

    def document(self, **more: str) -> dict[str, str]:
        return {**asdict(self), "path": str(self.path), **more}


@cache
def doc_pages() -> tuple[DocPage, ...]:
    """Return the pages in the order of ``README.md``, which lists them by task."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = [(task[1], *found.groups()) for task in _TASK.finditer(text) for found in _LISTED.finditer(task[2])]
    return tuple(_read_page(task, FOLDER / place, " ".join(about.split())) for task, place, about in listed)


def _read_page(task: str, path: Path, about: str) -> DocPage:
    with path.open(encoding="utf-8") as file:
        title = next((line[2:].strip() for line in file if line.startswith("# ")), path.stem)
    return DocPage(path.stem, task, title, about, path)


def search_pages(text: str) -> list[tuple[DocPage, str]]:
    """Return the pages that contain all words of ``text``, each with the heading of the section that matches best.
    Pages with more of the words in name, title and subject come first; among equals, pages with more occurrences."""
    words = text.lower().split()
    found = []
    for page in doc_pages():
        parts = re.split(r"^#+ ", page.path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        title = f"{page.name} {page.title} {page.about}"
        if all(word in f"{title}\n{' '.join(parts)}".lower() for word in words):
            best = max(parts, key=lambda part: (_held(part, words), -len(part)))
            rank = (_held(title, words), sum(map(" ".join(parts).lower().count, words)))
            found.append((rank, (page, best.partition("\n")[0].strip())))
    return [one for _, one in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _held(text: str, words: list[str]) -> int:
    return sum(word in text.lower() for word in words)


def _complete(incomplete: str) -> list[str]:
    return [page.name for page in doc_pages() if page.name.startswith(incomplete)]


@app.command()
def docs(
    page: Annotated[
        list[str] | None, typer.Argument(help="Name of a page. Default: list all pages.", autocompletion=_complete)
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Print the path of the page's file.")] = False,
    find: Annotated[
        str | None,
        typer.Option("--find", metavar="WORDS", help="List the pages that contain all these words, best match first."),
    ] = None,
    json: Json = False,
) -> None:
    """Print a page of the documentation, which is part of every installation.

    On a terminal, the page is formatted; files and pipes receive Markdown. `llmb docs schema NAME` prints the JSON
    Schema of a stored file: run.json, metrics.jsonl, cluster_config.yaml, campaign, catalogue and others.

    Examples:

    - `llmb docs`

    - `llmb docs run-on-slurm | less`

    - `llmb docs schema run.json`

    - `llmb docs --find slow nodes`
    """
    if find is not None:
        _find(" ".join((find, *(page or ()))), as_json=json)
    elif not page:
        _list(as_json=json)
    elif page[0] == "schema":
        if len(page) != 2:
            do = "pass one, as in 'llmb docs schema run.json'"
            raise UsageError("'schema' requires one stored file", choices=STORED, do=do)
        print_output(stored_schema(page[1]))
    elif len(page) > 1:
        raise UsageError("only one page can be printed", do=f"pass one, or use 'llmb docs --find {' '.join(page)}'")
    else:
        _print(Path(page[0]).stem, only_path=path, as_json=json)


def _list(*, as_json: bool) -> None:
    if as_json:
        print_output({"pages": [page.document() for page in doc_pages()]})
        return
    print_output("'llmb docs PAGE' prints a page, 'llmb docs --find WORDS' searches them.\n")
    for task, pages in groupby(doc_pages(), key=lambda page: page.task):
        rows = [(page.name, page.about.removesuffix(".")) for page in pages]
        print_output(rows_table(f"\n{task}", ("page", "about"), rows))


def _find(words: str, *, as_json: bool) -> None:
    found = search_pages(words)[:MOST_PAGES]
    if as_json:
        print_output({"pages": [page.document(heading=heading) for page, heading in found]})
        return
    if not found:
        do = "use fewer or other words; 'llmb docs' lists all pages"
        raise UsageError(f"no page of the documentation contains all the words '{words}'", do=do)
    rows = [(page.name, page.title, heading if heading != page.title else "") for page, heading in found]
    print_output(rows_table(f"pages on '{words}'; 'llmb docs PAGE' prints one", ("page", "title", "under"), rows))


def _print(name: str, *, only_path: bool, as_json: bool) -> None:
    pages = {page.name: page for page in doc_pages()}
    if name not in pages:
        raise unknown("page", name, pages, do="see 'llmb docs' for all pages")
    page = pages[name]
    text = page.path.read_text(encoding="utf-8")
    if as_json:
        print_output(page.document(text=text))
    elif only_path:
        print_output(f"{page.path}\n")
    elif sys.stdout.isatty():
        print_markdown(text)
    else:
        print_output(text)


STORED = {
    "run.json": ("llmb.runs.record:RunRecord",),
    "metrics.jsonl": ("llmb.runs.steps:Step",),
    "rank_times.jsonl": ("llmb.runs.rank_times:RankTimes",),
    "job.json": ("llmb.runs.record:SubmittedJob",),
    "job_spec.json": ("llmb.launch.jobspec.spec:JobSpec",),
    "job_end.json": ("llmb.runs.record:JobEnd",),
    "task.json": ("llmb.jobs.task:TaskRecord",),
    "cluster_config.yaml": ("llmb.launch.scheduler_lookup:cluster_schema",),
    "campaign": ("llmb.jobs.campaigns.campaign:Campaign",),
    "catalogue": tuple(
        f"llmb.catalogue.schema:{name}File"
        for name in ("Workload", "Model", "Published", "Documents", "Hardware", "Fabrics", "Rates")
    ),
}
"""The records that a file may contain, by the file's name or kind; a ``.jsonl`` file has one on each line."""


class _Described(GenerateJsonSchema):
    """A JSON Schema generator that uses docstrings of fields as descriptions, and adds the keys for reasons."""

    def model_schema(self, schema: Any) -> dict[str, Any]:  # noqa: ANN401 (pydantic's own type is not of its interface)
        return _described(schema["cls"], super().model_schema(schema))

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:  # noqa: ANN401
        if schema["cls"] is Missing:
            return {"type": "null"}
        return _described(schema["cls"], super().dataclass_schema(schema))

    def encode_default(self, dft: Any) -> Any:  # noqa: ANN401
        no_json = isinstance(dft, Missing) or (isinstance(dft, float) and not isfinite(dft))
        return None if no_json else super().encode_default(dft)


def stored_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a stored file; raise UsageError if the file has none."""
    if name not in STORED:
        raise unknown("stored file", name, STORED)
    records = [_record(place) for place in STORED[name]]
    return TypeAdapter(reduce(or_, records)).json_schema(schema_generator=_Described)


def _record(place: str) -> type:
    module, _, name = place.partition(":")
    found = getattr(import_module(module), name)
    return found if isinstance(found, type) else found()


def _described(record: type, schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    for base in reversed(record.__mro__):
        for name, text in _field_docstrings(base):
            if name in properties:
                properties[name]["description"] = text
    if issubclass(record, ReasonedRecord):
        reason = {"anyOf": [{"type": "string"}, {"type": "null"}]}
        properties |= {key: {**reason, "description": f"Why {name} is unknown."} for name, key in record.reason_keys()}
    return schema


def _field_docstrings(record: type) -> Iterator[tuple[str, str]]:
    statements = _classes(record.__module__).get(record.__name__, []) if record.__module__.startswith("llmb.") else []
    for field, below in pairwise(statements):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    source = ast.parse(inspect.getsource(import_module(module)))
    return {item.name: item.body for item in source.body if isinstance(item, ast.ClassDef)}
