# SPDX-License-Identifier: Apache-2.0
"""A page in a real browser: it fits, asks for nothing, works with the keyboard and without JavaScript."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmb.cli.main import app, exit_code_of
from llmb.runs.steps import read_rank_times, read_steps

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
TRAINED = pytest.mark.parametrize("pages", ["recorded", pytest.param("trained", marks=pytest.mark.slow)], indirect=True)
"""Where only training has all that a page can show."""
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


ROUNDED = 1e-3
"""Four digits are shown."""
ROWS = "(table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
NAMES = {
    "published": "document's formula",
    "full": "full attention",
    "causal": "causal attention",
    "packed": "packed documents",
}
PARTS = {
    "attention": "attention",
    "matrix products": "matrix_product",
    "other kernels": "other",
    "memory copies": "memory_copy",
    "communication, exposed": "communication_exposed",
    "CUDA graphs": "cuda_graph",
    "unclassified": "unclassified",
    "idle": "idle",
}


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
def test_notes_of_results_are_read_without_scrolling(opened: Callable[..., Any]) -> None:
    page = opened(width=min(WIDTHS))
    notes = page.locator(".tables .noted td:last-child:not(:empty)")
    ends = notes.evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().right)")
    assert len(ends) > 10
    assert max(ends) <= min(WIDTHS)
    assert page.locator(".tables .scroll").evaluate_all(
        "(all) => all.every((one) => one.scrollWidth <= one.clientWidth)"
    )


@pytest.mark.parametrize(
    "pages", ["recorded", pytest.param("trained", marks=[pytest.mark.slow, pytest.mark.measured])], indirect=True
)
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
    assert page.locator("#runs-table tbody tr").count() == runs_in(pages)
    assert page.locator("button").count() == 0
    page.locator("summary").first.click()
    assert page.locator("details[open] table").first.is_visible()


def runs_in(root: Path) -> int:
    return len(list(root.rglob("run.json")))


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
    assert page.get_by_role("status").text_content() == f"3 of {runs_in(pages)}"


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


@pytest.mark.slow
def test_a_link_to_hidden_data_opens_it(opened: Callable[..., Any]) -> None:
    page = opened("compared")
    page.evaluate("location.hash = document.querySelector('figure table').id")
    page.wait_for_selector("figure details[open] table")


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


@TRAINED
def test_every_figure_is_that_of_the_result(
    opened: Callable[..., Any], pages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(pages))
    page, results = opened(), {}
    for path in pages.rglob("run.json"):
        exit_code_of(app, ["result", str(path.parent), "--json"])
        result = json.loads(capsys.readouterr().out)
        results[result["id"]] = result
    head, *runs = page.evaluate(f"({ROWS})(document.querySelector('#runs-table'))")
    assert len(runs) == len(results)
    for row in runs:
        shown, result = dict(zip(head, row, strict=True)), results[row[0]]
        times, tokens = result["step_time_s"] or {}, result["tokens_per_s"]
        expected = [times.get("mean"), 100 * times["cv"] if times else None, tokens]
        assert figures([shown["step s"], shown["CV %"], shown["tokens/s"]]) == pytest.approx(
            [value for value in expected if value is not None], rel=ROUNDED
        )
        assert shown["status"] == result["status"]
    failed = [result["id"] for result in results.values() if result["status"] != "success"]
    assert sorted(page.locator("#missing ~ .missing b").all_text_contents()) == sorted(failed)
    shown_and_table = f"[one.querySelector('h2 ~ p b').textContent, ({ROWS})(one.querySelector('.tables table'))]"
    sections = page.locator(".recipe").evaluate_all(f"(all) => all.map((one) => {shown_and_table})")
    assert len(sections) == page.locator("nav .mark").count()
    for run, (head, *rows) in sections:
        expected = expected_figures(results[run])
        for row in rows:
            measured = figures(
                [text for text, name in zip(row, head, strict=True) if name in ("measured", "published")]
            )
            assert measured == pytest.approx(expected.get(row[0], []), rel=ROUNDED), (run, row)


@pytest.mark.slow
def test_the_slow_rank_is_seen(browser: Any, trained: Path) -> None:
    page = browser.new_page()
    page.goto((trained / "all.html").as_uri())
    figure = page.locator("figure[id^=ranks-][id*=on-4-x-cpu]")
    assert "rank 3 is" in str(figure.locator("figcaption").text_content())
    (path,) = [path for path in trained.rglob("rank_times.jsonl") if "gpus4_" in str(path)]
    steps, times = read_steps(path.with_name("metrics.jsonl")), read_rank_times(path)
    assert [line.first_step for line in times] == [step.step for step in steps]
    assert [max(line.layer_us) for line in times] == pytest.approx([1e6 * step.layer_s_max for step in steps], abs=0.1)
    page.close()


def figures(texts: Sequence[str]) -> list[float]:
    """All numbers of cells."""
    return [float(one) for text in texts for one in re.findall(r"-?\d[\d.]*(?:e[-+]\d+)?", text.replace(",", ""))]


def expected_figures(result: dict[str, Any]) -> dict[str, list[float]]:
    """The numbers of each row that has some, from the JSON of the result: measured, then published."""
    counters, load, use = (result[name] or {} for name in ("counters", "expert_load", "resources"))
    known = result["expectations"][0] if result["expectations"] else {}
    rows: dict[str, Any] = {
        "non-finite steps": counters.get("non_finite_steps"),
        "skipped steps": counters.get("skipped_steps"),
        "peak memory GiB": result["peak_memory_gib"],
        "loss": list(result["loss"].values()) if result["loss"] else None,
        "busiest expert / mean": load.get("max_over_mean"),
        "experts without tokens": load.get("idle_experts"),
        "dropped tokens": load.get("dropped_pct"),
        "host CPU %": max((host["cpu_pct_mean"] or 0 for host in use.get("hosts", [])), default=None),
        "energy J/token": use.get("energy_j_per_token"),
    }
    if times := result["step_time_s"]:
        low, high = times["ci95"]
        rows |= {f"step time s, {name}": times[name] for name in ("median", "std")}
        rows["step time s, mean"] = [times["mean"], known.get("step_time_s")]
        rows["step time s, 95 %"] = [low, high] if low > 0 else None
    if result["tokens_per_s"]:
        padded = ", padded" if result["packing"] else ""
        rows[f"tokens/s{padded}"] = [result["tokens_per_s"], known.get("tokens_per_s")]
        rows["tokens/s, real"] = result["real_tokens_per_s"]
        rows[f"tokens/s per GPU{padded}"] = result["tokens_per_s_per_gpu"]
        rows["days per 1T tokens"] = [result["days_per_1t_tokens"], known.get("days_per_1t_tokens")]
        for convention, name in NAMES.items():
            published = known.get("mfu_pct") if convention == "published" else None
            rows[f"TFLOPS per GPU, {name}"] = result["tflops_per_gpu"][convention]
            rows[f"MFU %, {name}"] = [result["mfu_pct"][convention], published]
    if result["profile"]:
        step = result["profile"]["breakdown"]
        rows |= {f"{name} %": 100 * step[f"{part}_s"] / step["duration_s"] for name, part in PARTS.items()}
    lists = {name: value if isinstance(value, list) else [value] for name, value in rows.items()}
    return {name: [one for one in values if one is not None] for name, values in lists.items()}
