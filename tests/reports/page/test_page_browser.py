# SPDX-License-Identifier: Apache-2.0
"""A page in a real browser: it fits, asks for nothing, works with the keyboard and without JavaScript."""

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmb.cli.main import app, exit_code_of

pytestmark = pytest.mark.browser
WIDTHS = (360, 768, 1280)
A4 = 718
"""Pixels between the margins of the paper on which Chromium prints."""
TOO_WIDE = """[...document.querySelectorAll('body *')]
  .filter((one) => !one.closest('svg, .skip') && one.checkVisibility() && getComputedStyle(one).overflowX === 'visible'
    && ![...up(one)].some((above) => getComputedStyle(above).overflowX === 'auto')
    && one.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((one) => one.outerHTML.slice(0, 100));
function* up(one) { while (one = one.parentElement) yield one }"""
MARKS = ("pass", "regressed", "inconclusive", "invalid", "not-comparable")
"""Verdicts that are on the page of recorded runs."""
TRAINED = pytest.mark.parametrize(
    "pages", ["recorded", pytest.param("trained", marks=pytest.mark.measured)], indirect=True
)
"""Where only training has all that a page can show."""
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


@pytest.fixture
def opened(browser: Any, pages: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page; afterwards nothing may have been requested or reported to the console."""
    noticed: list[str] = []
    contexts = []

    def open_page(name: str = "all", width: int = 1280, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: noticed.append(message.text))
        page.on("pageerror", lambda error: noticed.append(str(error)))
        page.on("request", lambda request: noticed.append(request.url) if "file:" not in request.url else None)
        page.goto((pages / f"{name}.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert noticed == []


@pytest.mark.slow
@TRAINED
def test_nothing_is_wider_than_the_window(opened: Callable[..., Any], pages: Path) -> None:
    """On paper also with the data open, as a reader may print them."""
    for file in (pages / "all.html", pages / "compared.html"):
        if not file.exists():
            continue
        page = opened(file.stem)
        page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        for media, widths in {"screen": WIDTHS, "print": (A4,)}.items():
            page.emulate_media(media=media)
            for width in widths:
                page.set_viewport_size({"width": width, "height": 800})
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                assert page.evaluate(TOO_WIDE) == [], f"at {width} px of {media}"


@TRAINED
def test_results_and_runs_are_read_without_scrolling(opened: Callable[..., Any]) -> None:
    page = opened(width=min(WIDTHS))
    notes = page.locator(".tables .noted td:last-child:not(:empty)")
    ends = notes.evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().right)")
    assert len(ends) > 10
    assert max(ends) <= min(WIDTHS)
    assert page.locator(".tables .scroll, .scroll:has(#runs-table)").evaluate_all(
        "(all) => all.every((one) => one.scrollWidth <= one.clientWidth)"
    )


@TRAINED
def test_axe_finds_nothing(opened: Callable[..., Any], pages: Path) -> None:
    """With the tables of settings and of one figure open; the insides of a plot are not there for screen readers."""
    page = opened("all", color_scheme="light")
    for mark in MARKS if (pages / "compared.html").exists() else ():
        assert page.locator(f".verdicts .{mark}").count(), f"no run is {mark}"
    # One recipe has all that the others have, and axe takes seconds for each.
    page.evaluate("document.querySelectorAll('.recipe ~ .recipe, figure ~ figure').forEach((one) => one.remove())")
    page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    spec = find_spec("axe_core_python")
    assert spec and spec.origin
    page.evaluate((Path(spec.origin).parent / "axe.min.js").read_text())
    assert violations(page, {"type": "tag", "values": TAGS}) == []
    page.emulate_media(color_scheme="dark")
    assert violations(page, {"type": "rule", "values": ["color-contrast"]}) == [], "the rest is as it was in light"


def violations(page: Any, rules: dict[str, Any]) -> Sequence[str]:
    found = page.evaluate("(rules) => axe.run({exclude: ['svg']}, {runOnly: rules})", rules)
    assert "color-contrast" in [one["id"] for one in found["passes"]]
    return [f"{one['id']}: {node['html'][:200]}" for one in found["violations"] for node in one["nodes"]]


@pytest.mark.slow
def test_without_javascript_everything_is_there(opened: Callable[..., Any], pages: Path) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator("svg").count() >= 10
    assert page.locator("#runs-table tbody tr").count() == len(list(pages.rglob("run.json")))
    assert page.locator("button").count() == 0
    page.locator("figure summary").first.click()
    assert page.locator("figure details[open] table").first.is_visible()


@pytest.mark.slow
def test_runs_are_sorted_and_filtered(opened: Callable[..., Any], pages: Path) -> None:
    page = opened()
    column = page.locator("#runs-table thead th", has_text="step s")
    column.locator("button").click()
    assert column.get_attribute("aria-sort") == "ascending"
    place = column.evaluate("(head) => head.cellIndex")
    cells = page.locator("#runs-table tbody tr").evaluate_all(
        "(rows, place) => rows.map((row) => row.cells[place].textContent)", place
    )
    times = [float(text) for text in cells if text]
    assert times == sorted(times)
    assert cells[len(times) :] == [""] * (len(cells) - len(times))
    page.get_by_label("Show runs with").fill("success after")
    assert page.locator("#runs-table tbody tr:visible").count() == 3
    assert page.get_by_role("status").text_content() == f"3 of {len(list(pages.rglob('run.json')))}"


@pytest.mark.slow
def test_data_and_plots_are_saved(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened("compared")
    figure = page.locator("figure[id^=step-times]").first
    figure.locator("summary").click()
    rows = figure.locator("tbody tr").count()
    with page.expect_download() as saved:
        figure.get_by_role("button", name="CSV").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == "step,step time s,note"
    assert len(lines) == rows + 1
    with page.expect_download() as saved:
        figure.get_by_role("button", name="SVG").click()
    drawn = Path(saved.value.path()).read_text()
    assert drawn.startswith("<svg")
    assert "var(" not in drawn


@pytest.mark.slow
def test_the_keyboard_reaches_everything_and_a_link_to_hidden_data_opens_it(opened: Callable[..., Any]) -> None:
    page = opened("compared")
    wanted = page.evaluate(
        "[...document.querySelectorAll('a, button, input, summary, [tabindex]')]"
        ".filter((one) => one.checkVisibility()).length"
    )
    reached = set()
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert len(reached - {-1}) >= wanted
    page.evaluate("location.hash = document.querySelector('figure table').id")
    page.wait_for_selector("figure details[open] table")
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    skip.focus()
    assert skip.bounding_box()["x"] >= 0


@pytest.mark.slow
def test_dark_and_light_differ_and_can_be_chosen(opened: Callable[..., Any]) -> None:
    page = opened("compared")
    color = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(color)
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(color) != before
    page.emulate_media(media="print")
    assert json.dumps(page.evaluate(color)) == '"rgb(255, 255, 255)"'


@pytest.mark.slow
def test_a_page_is_printed_where_there_is_a_browser(
    browser: Any, pages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(pages))
    file = pages / "page.pdf"
    assert exit_code_of(app, ["report", "before", "--format", "pdf", "-o", str(file)]) == 0
    assert file.read_bytes().startswith(b"%PDF")
    monkeypatch.setenv("PATH", str(pages / "empty"))
    assert exit_code_of(app, ["report", "before", "--format", "pdf", "-o", str(pages / "none.pdf")]) == 3
    assert "no browser" in capsys.readouterr().err
    assert not (pages / "none.pdf").exists()
