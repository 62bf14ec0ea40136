# SPDX-License-Identifier: Apache-2.0
"""A page in a real browser: it fits, asks for nothing, works with the keyboard and without JavaScript."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fake_steps import steps_of
from recorded_runs import gpu_record, times_around, write_run

from llmb.catalogue.resolve import Overrides
from llmb.cli.main import app, exit_code_of
from llmb.programs.conclude import conclude_run
from llmb.programs.port import End
from llmb.runs.folder import RunFolder
from llmb.runs.steps import step_to_json

pytestmark = pytest.mark.browser
WIDTHS = (360, 768, 1280)
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
"""Without these the browser itself asks the network for things."""
LONG = "a-label-without-a-place-to-break-it-" * 6
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


@pytest.fixture(scope="module")
def browser(needs: Callable[[str, bool, str], None]) -> Iterator[Any]:
    program = shutil.which("chromium")
    present = bool(program and find_spec("playwright") and find_spec("axe_core_python"))
    needs("browser", present, "apt-get install chromium; pip install -e '.[test]'")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=list(QUIET))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of runs of every kind: repeats, scales, a slow one, failed ones, a long one."""
    root = tmp_path_factory.mktemp("root")
    below = root / "workloads" / "w" / "experiments" / "e"
    for repeat in range(3):
        write_run(below, labeled("before"), times_around(12.0 + repeat / 50))
        write_run(below, labeled("after"), times_around(13.0 + repeat / 50))
    for scale in (16, 32):
        write_run(below, gpu_record(scale=scale, nodes=("node1", "node2")), times_around(12.5))
    write_run(below, gpu_record(dtype="fp8"), times_around(9.0)[:7], exit_code=1)
    write_run(below, gpu_record("pretrain_nemotron4", "15b", 64, nodes=[f"n{place}" for place in range(8)]), [])
    not_finite(below)
    write_run(below, labeled(LONG, "70b", 64), times_around(5.0))
    write_run(below, gpu_record(dtype="fp8", scale=16, nodes=("node1", "node2")), times_around(9.0, 2.0))
    write_run(below, gpu_record(scale=8, overrides=Overrides(mbs=2)), times_around(9.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMB_INSTALL", str(root))
        for name, words in {"all": [], "compared": ["after", "--against", "before"]}.items():
            assert exit_code_of(app, ["report", *words, "-o", str(root / f"{name}.html")]) == 0
    return root


def labeled(label: str, size: str = "8b", scale: int = 8) -> Any:
    return gpu_record(size=size, scale=scale).model_copy(update={"label": label})


def not_finite(below: Path) -> None:
    path = write_run(below, gpu_record(dtype="bf16", steps=20), times_around(12.0, steps=20))
    folder = RunFolder(path)
    record = gpu_record(steps=20).model_validate_json(folder.record.read_text())
    steps = steps_of(times_around(12.0, steps=5), record.plan)
    spoiled = steps_of(times_around(12.0, steps=6), record.plan, loss=float("nan"))[-1]
    folder.steps.write_text("".join(f"{step_to_json(step)}\n" for step in [*steps, spoiled]))
    conclude_run(folder, record.model_copy(update={"status": "running", "result": None}), End(1))


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


@pytest.mark.parametrize("name", ["all", "compared"])
def test_nothing_is_wider_than_the_window(opened: Callable[..., Any], name: str) -> None:
    for width in WIDTHS:
        page = opened(name, width)
        page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[-1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(opened: Callable[..., Any], scheme: str) -> None:
    """With the tables of settings and of one figure open; the insides of a plot are not there for screen readers."""
    page = opened("all", color_scheme=scheme)
    for mark in ("pass", "regressed", "inconclusive", "invalid", "not-comparable"):
        assert page.locator(f".verdicts .{mark}").count(), f"no run is {mark}"
    # One recipe has all that the others have, and axe takes seconds for each.
    page.evaluate("document.querySelectorAll('.recipe ~ .recipe, figure ~ figure').forEach((one) => one.remove())")
    page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    assert violations(page) == []


def violations(page: Any) -> Sequence[str]:
    spec = find_spec("axe_core_python")
    assert spec and spec.origin
    page.evaluate((Path(spec.origin).parent / "axe.min.js").read_text())
    options = {"runOnly": {"type": "tag", "values": TAGS}}
    found = page.evaluate("(options) => axe.run({exclude: ['svg']}, options)", options)
    assert "color-contrast" in [one["id"] for one in found["passes"]]
    return [f"{one['id']}: {node['html'][:200]}" for one in found["violations"] for node in one["nodes"]]


def test_without_javascript_everything_is_there(opened: Callable[..., Any]) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator("svg").count() >= 10
    assert page.locator("#runs-table tbody tr").count() == 14
    assert page.locator("button").count() == 0
    page.locator("summary").first.click()
    assert page.locator("details[open] table").first.is_visible()


def test_runs_are_sorted_and_filtered(opened: Callable[..., Any]) -> None:
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
    assert page.get_by_role("status").text_content() == "3 of 14"


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


def test_the_keyboard_reaches_everything(opened: Callable[..., Any]) -> None:
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
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    skip.focus()
    assert skip.bounding_box()["x"] >= 0


def test_a_link_to_hidden_data_opens_it(opened: Callable[..., Any]) -> None:
    page = opened("compared")
    page.evaluate("location.hash = document.querySelector('figure table').id")
    page.wait_for_selector("figure details[open] table")


def test_dark_and_light_differ_and_can_be_chosen(opened: Callable[..., Any]) -> None:
    page = opened("compared")
    color = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(color)
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(color) != before
    page.emulate_media(media="print")
    assert json.dumps(page.evaluate(color)) == '"rgb(255, 255, 255)"'


def test_a_page_is_printed(browser: Any, pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(pages))
    file = pages / "page.pdf"
    assert exit_code_of(app, ["report", "before", "--format", "pdf", "-o", str(file)]) == 0
    assert file.read_bytes().startswith(b"%PDF")


def test_without_a_browser_nothing_is_printed(
    pages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(pages))
    monkeypatch.setenv("PATH", str(pages / "empty"))
    assert exit_code_of(app, ["report", "before", "--format", "pdf", "-o", str(pages / "none.pdf")]) == 3
    assert "no browser" in capsys.readouterr().err
    assert not (pages / "none.pdf").exists()
