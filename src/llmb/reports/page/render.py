# SPDX-License-Identifier: Apache-2.0
"""Renders a page as self-contained HTML, PDF or Markdown, and its plots as images, by default without private names."""

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from getpass import getuser
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from llmb import __version__
from llmb.base.errors import EnvironmentProblem, pip_install, unknown
from llmb.base.scratch import scratch_folder
from llmb.base.secrets import redacted
from llmb.base.shown_text import printable_lines
from llmb.base.tools import ask_program
from llmb.reports.page.charts import standalone, themed
from llmb.reports.page.contents import Contents
from llmb.reports.table import markdown_table, markdown_text
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.source_version import source_version

TEMPLATES = "templates"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
"""Browsers that accept Chromium's options."""
LIMIT_S = 120.0
OFFLINE = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
"""Options that disable windows, and network access of the browser itself."""


def page_html(contents: Contents, shown: Callable[[str], str]) -> str:
    """Render the page; ``shown`` is applied to every string. Raise EnvironmentProblem if a library is missing."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        do = pip_install("report")
        raise EnvironmentProblem("a page needs jinja2, which is not installed", do=do) from error

    def finalize(value: Any) -> Any:  # noqa: ANN401 (any value of a template)
        return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    def drawn(name: str) -> Markup:
        return Markup(_shown_in(themed(contents.figures[name].drawing.svg()), shown))  # noqa: S704 (escaped by the library that drew it)

    environment = Environment(
        loader=PackageLoader("llmb.reports.page", TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters["drawn"] = drawn
    parts = {name: Markup(_file(name)) for name in ("style.css", "script.js")}  # noqa: S704 (our own files)
    return environment.get_template("report.html").render(
        contents=contents,
        style=parts["style.css"],
        script=parts["script.js"],
        made_at=datetime.now().strftime("%Y-%m-%d %H:%M"),
        version=f"{__version__} ({source_version().text()})",
    )


def page_pdf(html: str) -> bytes:
    """Return the page as a PDF file in its print layout. Raise EnvironmentProblem if no browser can print it."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    do = "pass --format html, and print the page from a browser"
    if browser is None:
        what = f"no browser that can print pages is installed; llmb looks for {', '.join(BROWSERS)}"
        raise EnvironmentProblem(what, do=do)
    with scratch_folder("llmb-page-") as folder:
        page, printed = folder / "page.html", folder / "page.pdf"
        page.write_text(html, encoding="utf-8")
        # A browser that runs as root has no sandbox. The page's text is escaped, and the page requests nothing.
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
        options = (*OFFLINE, *sandbox, f"--user-data-dir={folder}/profile", "--no-pdf-header-footer")
        said = ask_program([browser, *options, f"--print-to-pdf={printed}", page.as_uri()], LIMIT_S)
        if said.problem or not printed.exists():
            raise EnvironmentProblem(f"the page was not printed: {said.problem or 'the browser wrote nothing'}", do=do)
        return printed.read_bytes()


def plot_file(contents: Contents, name: str, form: Literal["svg", "png"], shown: Callable[[str], str]) -> bytes:
    """Return a plot as an image. ``name`` may be the unambiguous beginning of a plot's name, up to a hyphen. Raise
    UsageError for any other name, EnvironmentProblem if matplotlib is not installed."""
    figures = contents.figures
    found = [name] if name in figures else [one for one in figures if one.startswith(f"{name}-")]
    if len(found) != 1:
        raise unknown("plot", name, found or figures, do="pass one of these, or a beginning that no other has")
    drawing = figures[found[0]].drawing
    return drawing.png(shown) if form == "png" else standalone(_shown_in(drawing.svg(), shown)).encode()


def _shown_in(svg: str, shown: Callable[[str], str]) -> str:
    return re.sub(r"(?<=>)[^<>]+(?=</text>)", lambda text: shown(text[0]), svg)


def _file(name: str) -> str:
    return (files("llmb.reports.page") / TEMPLATES / name).read_text(encoding="utf-8")


def page_markdown(contents: Contents, shown: Callable[[str], str]) -> str:
    """Format a page for a pull request or a chat: the verdicts, each recipe's collapsed results, and failed runs."""
    parts = [f"{one.symbol} **{markdown_text(one.title)}**: {markdown_text(one.headline)}" for one in contents.sections]
    text = "\n\n".join(["\n".join(f"- {part}" for part in parts), markdown_table(contents.head).rstrip()])
    text += "".join(
        f"\n\n<details><summary>{markdown_text(section.title)}</summary>\n\n"
        + "\n\n".join(f"{markdown_text(table.title)}\n\n{markdown_table(table)}" for table in section.tables)
        + "\n\n</details>"
        for section in contents.sections
    )
    for run, reason, command in contents.failed:
        text += f"\n\n- {run.id}: {markdown_text(reason)}; `{command}`"
    return shown(text + "\n")


_HOME = re.compile(r"(?<![\w.])/(?:home|Users)/[^/\s:;,'\"]+|(?<![\w./])/root(?=[/\s:;,'\"]|$)")
SYSTEM_USERS = ("root", "daemon")
"""System accounts, whose names are not private."""
NO_HOST = ("localhost",)


def public_text(runs: Iterable[AnalyzedRun], root: Path) -> Callable[[str], str]:
    """Return a function that hides secrets, names of hosts and the user, homes and ``root``, as pages do by default."""
    hosts = dict.fromkeys(name for run in runs for name in _hosts(run) if name)
    hosts |= dict.fromkeys((socket.gethostname(), socket.getfqdn()))
    named = {name: f"host-{number}" for number, name in enumerate((h for h in hosts if h not in NO_HOST), start=1)}
    with suppress(KeyError, OSError):  # a user without a name
        if (user := getuser()) not in SYSTEM_USERS:
            named[user] = "user"
    home = str(Path.home())
    folders = dict.fromkeys((str(root), str(root.resolve())), "$LLMB_INSTALL")
    if home != "/root":  # which other paths may contain, such as data/root; _HOME matches it as a home
        folders[home] = "~"
    places = _any_of((folder for folder in folders if len(folder) > 1), before="")
    names = _any_of(named, before=r"(?<![\w-])")

    def hide(text: str) -> str:
        text = _HOME.sub("~", places.sub(lambda found: folders[found[0]], full_text(text)))
        return names.sub(lambda found: named[found[0]], text)

    return hide


def _any_of(texts: Iterable[str], *, before: str) -> re.Pattern[str]:
    """Return a pattern that finds the longest of the strings that follows the pattern ``before`` and ends a word."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile(rf"{before}(?:{'|'.join(map(re.escape, ordered))})(?![\w-])" if ordered else r"(?!)")


def full_text(text: str) -> str:
    """Redact secrets and escape control characters; names and folders stay."""
    return printable_lines(redacted(text))


def _hosts(run: AnalyzedRun) -> Iterator[str]:
    yield from run.nodes
    if run.record and run.record.job:
        yield run.record.job.nodes
    if run.record and run.record.result and (network := run.record.result.network):
        yield from (name for group in network.nodes for name in group.nodes)
