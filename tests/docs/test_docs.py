# SPDX-License-Identifier: Apache-2.0
"""The documentation agrees with the code: reference pages, links, commands and the output shown for them."""

import doctest
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import generate_reference
import pytest

from llmb.base.errors import LlmbError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Convention
from llmb.catalogue.resolve import Request, resolve
from llmb.catalogue.throughput import flops_per_sequence
from llmb.cli.main import COMMANDS, load_command

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = {"list", "show", "metrics"}
PROGRAM_OPTIONS = {"--version", "--install-completion"}
"""Of the program, without a command."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:^|[\s;])(?:\S*/)?llmb (?P<rest>[^|;&>]*)")


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it, and the output that follows it there."""

    page: str
    arguments: tuple[str, ...]
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}: llmb {' '.join(self.arguments)}"


def shown_commands(page: Path) -> Iterator[Shown]:
    name = str(page.relative_to(ROOT))
    for language, block in FENCE.findall(page.read_text()):
        if language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                yield from (Shown(name, arguments, None) for arguments in commands_in(line))
        elif language == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                yield from (Shown(name, arguments, output) for arguments in commands_in(line))


def commands_in(line: str) -> Iterator[tuple[str, ...]]:
    code = line.split(" #")[0]
    for match in COMMAND.finditer(code):
        arguments = tuple(shlex.split(match["rest"]))
        if arguments and not any(re.search(r"[<$]|\.\.\.", argument) for argument in arguments):
            yield arguments


SHOWN = [shown for page in PAGES for shown in shown_commands(page)]


def test_generated_pages_are_fresh() -> None:
    stale = [path.name for path, text in generate_reference.pages().items() if path.read_text() != text]
    assert not stale, "run 'make reference'"


def test_every_layout_and_every_figure_is_in_the_catalogue_page() -> None:
    catalogue = Catalogue()
    text = generate_reference.pages()[generate_reference.CATALOGUE]
    layouts, figures = text.split("\n## Published figures\n")
    rows = sum(len(item.rows) for workload in catalogue.workloads.values() for item in workload.layouts)
    assert len(re.findall(r"^\| \d* \| \d+ \| \d+ \|", layouts.split("\n## Layouts\n")[1], re.MULTILINE)) == rows
    shown = re.findall(r"^\| \d+ \| \d+ \| [\d.]+ \|", figures.split("\n## FLOPs as published\n")[0], re.MULTILINE)
    assert len(shown) == len(catalogue.figures)


def test_the_readme_names_the_releases_that_have_figures() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"\(releases ([\d., and]+); (\d+) of (\d+) are for the (\w+)\)", text)
    assert found
    catalogue = Catalogue()
    figures = [figure for published in catalogue.published.values() for figure in published.figures]
    assert sorted(re.findall(r"\d\d\.\d\d", found[1])) == sorted({item.expectation.release for item in figures})
    of_type = sum(item.gpu_type == found[4].lower() for item in figures)
    assert (int(found[2]), int(found[3])) == (of_type, len(figures))
    bridge = re.search(r"the (\d+) rows of .* tables \(releases (\S+) to (\S+); (\d+) are for the H100\)", text)
    rows = catalogue.bridge.figures
    ends = (rows[0].expectation.release, rows[-1].expectation.release)
    assert bridge
    assert bridge.groups() == (str(len(rows)), *ends, str(sum(row.gpu_type == "h100" for row in rows)))


def test_the_table_of_flops_is_what_the_code_counts() -> None:
    page = ROOT / "docs" / "explanation" / "flops-and-mfu.md"
    row = re.compile(r"^\| (\S+ \w+)[^|]* \| (\d+) \| (\S+) \| [^|]+ \| (\S+) \| (\S+) \| (\S+) \|", re.MULTILINE)
    shown = sorted(row.findall(page.read_text()))
    catalogue = Catalogue()
    counted = set()
    for workload in catalogue.workloads.values():
        for item in workload.layouts:
            if item.document in catalogue.published:
                scale, gpu_type = item.rows[-1].gpus, item.gpu_types[0]
                request = Request(
                    workload=workload.workload, size=item.size, gpu_type=gpu_type, scale=scale, release=item.release
                )
                recipe = resolve(catalogue, request)
                flops = (flops_per_sequence(recipe, convention) for convention in Convention)
                texts = ("n/a" if value is None else f"{value:.5g}".replace("+", "") for value in flops)
                counted.add((f"{workload.model} {item.size}", str(item.seq_len), *texts))
    assert shown == sorted(counted)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, by GitHub's rule."""
    text = FENCE.sub("", page.read_text())
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if not number else f"{slug}-{number}" for slug, last in found.items() for number in range(last + 1)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def test_pages_written_by_hand_get_no_longer() -> None:
    texts = [re.sub(r"(?s)<!-- gen.*?<!-- end", "", page.read_text()) for page in [ROOT / "CONTRIBUTING.md", *PAGES]]
    by_hand = [text for text in texts if not re.search("<!-- Written by|writes this page", text)]
    assert sum(len(text.split()) for text in by_hand) <= 33_000, "shorten a page, and then this limit"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_what_it_answers(page: Path) -> None:
    first = re.sub(r"^<!--.*-->\n\n", "", page.read_text()).split("\n\n")[1]
    assert first[0] not in "#|-" and not first.startswith("```"), f"it begins with '{first[:40]}'"


def test_pages_show_every_command() -> None:
    assert {shown.arguments[0] for shown in SHOWN} >= set(COMMANDS)


def test_setup_installs_what_the_commands_of_the_readme_need() -> None:
    table = (ROOT / "docs" / "how-to" / "install.md").read_text()
    needs = {
        command: extra
        for extra, commands in re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", table, re.MULTILINE)
        for command in re.findall(r"`llmb (\w+)`", commands)
    }
    (installed,) = re.findall(r'-e "\.\[([\w,]+)\$', (ROOT / "scripts" / "setup.sh").read_text())
    shown = {needs[shown.arguments[0]] for shown in shown_commands(ROOT / "README.md") if shown.arguments[0] in needs}
    assert {"engine", "prepare", "report"} == shown
    assert shown - {"engine"} <= set(installed.split(",")), "torch is installed apart"


@pytest.mark.parametrize("shown", SHOWN, ids=str)
def test_shown_commands_are_understood(shown: Shown) -> None:
    name, *options = shown.arguments
    if name in PROGRAM_OPTIONS:
        return
    command = load_command(name)
    if hasattr(command, "commands") and options:
        name, *options = options
        command = command.commands[name]
    command.make_context(name, options)


@pytest.mark.parametrize("shown", [shown for shown in SHOWN if shown.arguments[0] in RUNNABLE], ids=str)
def test_shown_commands_do_what_is_shown(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    name, *options = shown.arguments
    try:
        load_command(name).main(options, standalone_mode=False)
        printed = capsys.readouterr().out
    except LlmbError as error:
        printed = f"llmb: error: {error}\n"
    if shown.output is None:
        assert not printed.startswith("llmb: error:"), printed
    else:
        assert doctest.OutputChecker().check_output(shown.output, printed, doctest.ELLIPSIS), printed


def test_the_picture_of_packages_is_what_import_linter_checks() -> None:
    text = (ROOT / "docs" / "explanation" / "design.md").read_text()
    (picture,) = (
        block
        for language, block in FENCE.findall(text[text.index("## Packages") : text.index("## Walks")])
        if language == "text"
    )
    shown = re.findall(r"^ ( \| )?(\w+) {2,}\S", picture, re.MULTILINE)
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [[name.removeprefix("llmb.") for name in layer.split(" | ")] for layer in contract["layers"]]
    assert [(" | " if place else "", name) for layer in layers for place, name in enumerate(layer)] == shown
    packages = {path.parent.name for path in (ROOT / "src" / "llmb").glob("*/__init__.py")}
    assert {name for _, name in shown} == packages - {"engine"}


@pytest.mark.slow
def test_the_walks_of_the_design_are_those_of_the_code() -> None:
    """In a process of its own: what another test has kept in a cache is not entered again."""
    support = ROOT / "tests" / "support"
    command = [sys.executable, support / "walks.py"]
    environ = {**os.environ, "PYTHONPATH": str(support)}
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert printed in (ROOT / "docs" / "explanation" / "design.md").read_text()
