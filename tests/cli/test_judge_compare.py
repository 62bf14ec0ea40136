# SPDX-License-Identifier: Apache-2.0
"""``llmb compare``: its documents, its exit codes, and its tables at 80 columns."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from called_here import call_llmb
from rich.cells import cell_len
from shown_tables import shown_lines
from timed_runs import noisy_times, write_run

from llmb.base.errors import LlmbError, NoVerdict
from llmb.cli.judge import raise_unless_passed
from llmb.jobs.find_runs import find_ended_runs
from llmb.reports.formats import shortened
from llmb.reports.verdict_report import compare_csv, compare_markdown, compare_tables
from llmb.runs.plan import Plan
from llmb.verdict.compare_runs import Comparison, compare_runs


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory, tiny_plan: Callable[..., Plan]) -> Path:
    """Before: fp32 and bf16. After: fp32 as fast, bf16 slower by 5 %. Noisy: fp32 with a CV of 3 %."""
    root = tmp_path_factory.mktemp("install")
    for number, (folder, dtype, mean_s, cv) in enumerate(
        [
            ("before", "fp32", 2.0, 0.003),
            ("before", "bf16", 1.0, 0.003),
            ("after", "fp32", 2.0, 0.003),
            ("after", "bf16", 1.05, 0.003),
            ("noisy", "fp32", 2.0, 0.03),
        ]
    ):
        for repeat in range(4):
            plan = tiny_plan(dtype=dtype)
            times = noisy_times(mean_s, cv, plan.steps, seed=10 * number + repeat)
            write_run(root / folder, plan, times, number=10 * number + repeat)
    failed = tiny_plan()
    write_run(root / "before", failed, [2.0, 2.0], number=90, failed="out of memory")
    return root


def compared(install: Path, before: str, after: str | None, **options: object) -> Comparison:
    found = [name and find_ended_runs(str(install / name), install, lambda _: None) for name in (before, after)]
    return compare_runs(*found, **options)


def exit_code(comparison: Comparison) -> int:
    try:
        raise_unless_passed(comparison)
    except LlmbError as error:
        return error.exit_code
    return 0


def test_the_command_prints_one_document_and_ends_with_5_if_a_row_regressed(install: Path) -> None:
    done = call_llmb("compare", install / "before", install / "after", "--json")
    assert done.returncode == 5, done.stderr
    document = done.document
    assert {"rows", "differences", "left_out"} <= document.keys()
    bf16, fp32 = sorted(document["rows"], key=lambda row: row["recipe"])
    assert {
        *("recipe", "n_before", "n_after", "before_s", "after_s", "delta_pct", "ci95_pct", "noise_pct", "verdict")
    } <= bf16.keys()
    assert (bf16["verdict"], fp32["verdict"]) == ("regressed", "pass")
    low, high = bf16["ci95_pct"]
    assert 3 < low < bf16["delta_pct"] < high < 7
    (left_out,) = document["left_out"]
    assert (left_out["reason"], left_out["side"]) == ("failed: out of memory", "before")
    assert "1 of 2 recipes regressed: pretrain_llama3.1 tiny bf16 on 2 x cpu" in done.stderr


def test_exit_codes(install: Path) -> None:
    assert exit_code(compared(install, "before", "after")) == 5
    assert exit_code(compared(install, "before", "after", tolerance_pct=8)) == 0
    assert exit_code(compared(install, "after", "before")) == 0  # improved
    assert exit_code(compared(install, "before", "noisy")) == 6  # inconclusive
    assert exit_code(compared(install, "noisy", None, vary=["dtype"])) == 6  # nothing to compare


def test_another_recipe_is_advised_only_if_both_sides_have_one(
    install: Path, tmp_path: Path, tiny_plan: Callable[..., Plan]
) -> None:
    write_run(tmp_path / "failed", tiny_plan(), [2.0, 2.0], number=1, failed="out of memory")
    write_run(tmp_path / "other", tiny_plan(dtype="bf16"), 50 * [1.0], number=2)
    before = find_ended_runs(str(install / "noisy"), install, lambda _: None)
    for side, advice in (("failed", None), ("other", "--vary KEY")):
        after = find_ended_runs(str(tmp_path / side), install, lambda _: None)
        with pytest.raises(NoVerdict) as caught:
            raise_unless_passed(compare_runs(before, after))
        assert (advice in (caught.value.do or "")) if advice else caught.value.do is None


def test_tables_fit_80_columns_and_are_whole_at_120(install: Path) -> None:
    tables = compare_tables(compared(install, "before", "after"))
    assert max(map(cell_len, shown_lines(tables))) <= 80
    headings = [line.split() for line in shown_lines(tables[0]) if line.startswith("recipe")]
    assert [words[-1] for words in headings] == ["verdict"], "a row is one row"
    lines = shown_lines(tables[0], 120)
    header = next(line for line in lines if line.startswith("recipe"))
    assert header.split()[-1] == "verdict"
    (row,) = (line for line in lines if line.startswith("pretrain_llama3.1 tiny bf16 on 2 x cpu  4 / 4"))
    assert row.endswith("regressed")


def test_an_inconclusive_row_says_how_many_more_runs_would_tell(install: Path) -> None:
    caption = compare_tables(compared(install, "before", "noisy", tolerance_pct=2.5))[0].caption
    assert caption and "more runs in total on both sides would settle it" in caption


def test_markdown_is_a_table_of_github(install: Path) -> None:
    lines = compare_markdown(compared(install, "before", "after")).splitlines()
    assert lines[0].startswith("**REGRESSED: 1 of 2 recipes, ")
    table = [line for line in lines if line.startswith("|")]
    assert table[0].startswith("| recipe | runs | before (s) |")
    assert {line.count("|") for line in table[:4]} == {9}
    assert any(line.startswith("<details><summary>Runs left out") for line in lines)
    assert "pretrain\\_llama3.1" in table[2]


def test_csv_has_a_line_for_each_row(install: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(compare_csv(compared(install, "before", "after")))))
    assert [row["verdict"] for row in rows] == ["pass", "regressed"]
    assert float(rows[1]["ci95_low_pct"]) < float(rows[1]["delta_pct"]) < float(rows[1]["ci95_high_pct"])


def test_values_are_short_and_worded_alike_on_both_sides() -> None:
    commit = "566c6b1e330fe47417f24685715d87e3df37f3f0"
    assert shortened(f"{commit}, {commit}") == "566c6b1e330f, 566c6b1e330f"
    assert shortened("node-with-a-long-name-" * 9).endswith("...")
    assert [shortened(value) for value in (True, None, "no, yes")] == ["yes", "none", "no, yes"]


def test_large_noise_is_a_plain_number(install: Path) -> None:
    comparison = compared(install, "before", "noisy")
    (row,) = comparison.rows
    rows = [row.model_copy(update={"noise_pct": noise}) for noise in (110.4, 0.274, None)]
    (table, *_) = compare_tables(comparison.model_copy(update={"rows": rows}))
    assert [cells[6] for cells in table.rows] == ["110", "0.27", "n/a"]


def test_a_number_is_expected_of_every_run_in_seconds(install: Path) -> None:
    done = call_llmb("judge", install / "after", "--expect", "2", "-v")
    assert done.stdout.startswith("8 verdicts: 4 pass, 4 improved")
    assert "PASS: 0.4 % slower than expected" in done.stdout and "47.5 % faster than expected" in done.stdout
    for wrong in ("0", "-1", "nan"):
        assert f"--expect {wrong} is not a step time" in call_llmb("judge", install / "after", "--expect", wrong).stderr


def test_words_that_select_no_runs_are_named(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(install))
    done = call_llmb("compare", "2020-01-01", "2020-01-02")
    assert (done.returncode, "there are no runs in 2020-01-01 and 2020-01-02" in done.stderr) == (2, True)
    assert "two groups are needed, but only one was specified" in call_llmb("compare", install / "before").stderr
