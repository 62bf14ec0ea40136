# SPDX-License-Identifier: Apache-2.0
"""What the engine comparison concludes from results."""

import pytest
from benchmarks.engine.store import difference, open_document, with_case
from benchmarks.engine.verdicts import judge, merged
from engine_comparison import SETTINGS, case_result, target_of


def test_published_figure_is_reached_from_its_value_on() -> None:
    for mfu, verdict in ((50.1, "not_reached"), (50.0, "reached"), (49.0, "reached")):
        (own,) = judge([case_result(mfu=50.0)], [target_of(mfu)])
        assert (own.verdict, own.measured, own.target) == (verdict, 50.0, mfu)


def test_another_engine_has_to_be_beaten() -> None:
    for tokens_per_s, verdict in ((99.0, "reached"), (100.0, "not_reached"), (200.0, "not_reached")):
        cases = [case_result(), case_result("huggingface", tokens_per_s=tokens_per_s)]
        (_, other) = judge(cases, [target_of(60)])
        assert (other.against, other.verdict) == ("tokens/s of huggingface", verdict)
        assert other.margin_pct == pytest.approx(100 * (100.0 / tokens_per_s - 1))


def test_what_did_not_run_is_not_judged() -> None:
    cases = [case_result(), case_result("huggingface", status="not_run"), case_result(dtype="fp8", status="failed")]
    found = {(verdict.dtype, verdict.shows): verdict for verdict in judge(cases, [target_of(40)])}
    assert found["bf16", "other_engine"].reason == "huggingface not run: boom"
    assert found["fp8", "published_mfu"].verdict == "not_measured"
    assert found["bf16", "published_mfu"].verdict == "reached"


def test_the_middle_round_counts() -> None:
    rounds = [case_result(times=(time_s,), number=number) for number, time_s in enumerate((3.0, 1.0, 2.0))]
    failed = case_result(status="failed", number=3)
    assert [case.step_times_s for case in merged([*rounds, failed])] == [(2.0,)]


def test_the_most_micro_batches_count_for_the_published_figure() -> None:
    """And the same number as the other engine's for the comparison with it."""
    many = case_result(mfu=60.0, tokens_per_s=110.0).model_copy(update={"ga": 16})
    own, other = judge([case_result(), many, case_result("huggingface", tokens_per_s=105.0)], [target_of(55)])
    assert (own.verdict, own.measured, own.micro_batches) == ("reached", 60.0, 16)
    assert (other.verdict, other.measured, other.micro_batches) == ("not_reached", 100.0, 4)
    failed = many.model_copy(update={"status": "failed", "mfu_pct": None})
    own, *_ = judge([case_result(), failed], [target_of(55)])
    assert (own.verdict, own.micro_batches) == ("not_reached", 4)


def test_a_verdict_says_how_far_rounds_differ() -> None:
    other = [case_result("huggingface", times=(time_s,), number=number) for number, time_s in enumerate((1.0, 1.03))]
    _, verdict = judge([case_result(times=(1.0,)), case_result(times=(1.01,), number=1), *other], [])
    assert verdict.rounds_differ_pct == pytest.approx(3)
    _, verdict = judge([case_result(), other[0]], [])
    assert verdict.rounds_differ_pct is None


def test_variants_are_shown_but_not_judged() -> None:
    variant = case_result(mfu=99.0, tokens_per_s=999.0).model_copy(update={"variant": "profile"})
    (own,) = judge([variant, case_result(mfu=50.0)], [target_of(60)])
    assert own.measured == 50.0


def test_results_of_other_code_are_named_and_not_judged() -> None:
    document = open_document(None, SETTINGS, fresh=True)
    old = case_result().model_copy(update={"code": "before"})
    document = document.model_copy(update={"cases": (old,)})
    wanted = case_result(status="not_run").model_copy(update={"reason": "budget: 1 s left", "code": "after"})
    assert difference(old, wanted) == "code before -> after"
    (kept,) = with_case(document, wanted).cases
    assert (kept.status, kept.tokens_per_s, kept.code) == ("done", old.tokens_per_s, "before")
    assert kept.outdated == "code before -> after; not measured again: budget: 1 s left"
    (own,) = judge([kept], [target_of(40)])
    assert own.verdict == "not_measured" and "outdated" in own.reason
    (new,) = with_case(document, case_result(tokens_per_s=7.0)).cases
    assert new.tokens_per_s == 7.0
