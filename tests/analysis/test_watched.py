# SPDX-License-Identifier: Apache-2.0
"""What gives cause for concern in a run that lasts."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from quick_order import step

from llmb.analysis.watched import KEPT_STEPS, Circumstances, Expected, Outlook, StepHistory, outlook
from llmb.analysis.watched_run import Watcher, watch
from llmb.runs.steps import StepNews
from llmb.verdict.causes_evidence import Work

RUNNING = Circumstances(state="running", last_step=99)


def history(count: int, time_s: float = 2.0, **changes: object) -> StepHistory:
    found = StepHistory()
    for number in range(count):
        # No series of a real run is constant.
        found.add(StepNews(number, time_s + 0.001 * (number * 7 % 5), 5.0 - number / 100, **changes))
    return found


def kinds(
    here: Circumstances, steps: StepHistory, since_last_s: float = 0.0, expected_s: float | None = None
) -> list[str]:
    expected = Expected(step_time_s=expected_s, source="as given", tolerance_pct=5.0) if expected_s else None
    return [concern.kind for concern in outlook(0.0, here, steps, since_last_s, expected).concerns]


def test_a_run_as_it_should_be_gives_none() -> None:
    seen = outlook(0.0, RUNNING, history(30), 1.0, Expected(step_time_s=2.0, source="as given", tolerance_pct=5.0))
    assert seen.concerns == ()
    assert (seen.done, seen.total, seen.first_loss) == (30, 100, 5.0)
    assert seen.forecast and seen.forecast.steps_left == 70


@pytest.mark.parametrize(
    ("state", "since_last_s", "stalled"),
    [("running", 9.0, False), ("running", 11.0, True), ("ended", 11.0, False), ("queued", 11.0, False)],
)
def test_no_step_for_several_times_the_median_is_a_stall(state: str, since_last_s: float, stalled: bool) -> None:
    found = kinds(Circumstances(state=state, last_step=99), history(30), since_last_s)
    assert found == (["stalled"] if stalled else [])


def test_a_pause_as_long_as_an_earlier_one_is_no_stall() -> None:
    steps = history(30)
    steps.steps[10] = steps.steps[10]._replace(step_time_s=20.0)
    assert kinds(RUNNING, steps, 39.0) == []
    assert kinds(RUNNING, steps, 41.0) == ["stalled"]


def test_nothing_stalls_after_the_last_step() -> None:
    assert kinds(RUNNING, history(100), 1000.0) == []


def test_the_ranks_own_report_of_a_stall_comes_first() -> None:
    seen = outlook(0.0, replace(RUNNING, stall="rank 1 hung"), history(30), 1000.0, None)
    assert [concern.text for concern in seen.concerns] == ["rank 1 hung"]


@pytest.mark.parametrize("values", [{"loss": math.nan}, {"loss": math.inf}, {"grad_norm": math.nan}])
def test_a_value_that_is_not_finite(values: dict[str, float]) -> None:
    steps = history(30)
    steps.add(StepNews(30, 2.0, 5.0)._replace(**values))
    steps.add(StepNews(31, 2.0, 5.0))
    (concern,) = outlook(0.0, RUNNING, steps, 0.0, None).concerns
    assert concern.kind == "not_finite"
    assert concern.text.startswith("step 30 ")


def test_a_loss_that_is_not_logged_is_not_bad() -> None:
    steps = history(30)
    steps.add(StepNews(30, 2.0, None))
    assert kinds(RUNNING, steps) == []


@pytest.mark.parametrize(("left_s", "text"), [(100.0, "will not finish"), (140.0, "may not finish"), (200.0, None)])
def test_the_time_limit_of_the_job(left_s: float, text: str | None) -> None:
    steps = StepHistory()
    for number in range(30):
        steps.add(StepNews(number, 1.7 + 0.6 * (number % 2), 5.0))
    seen = outlook(0.0, replace(RUNNING, limit_left_s=left_s), steps, 0.0, None)
    assert [concern.kind for concern in seen.concerns] == (["time_limit"] if text else [])
    assert all(str(text) in concern.text for concern in seen.concerns)


def test_how_many_steps_the_time_limit_costs() -> None:
    (concern,) = outlook(0.0, replace(RUNNING, limit_left_s=70.0), history(30), 0.0, None).concerns
    assert "36 of its steps will be missing" in concern.text or "35 of its steps will be missing" in concern.text


def test_a_limit_that_has_passed_while_the_next_step_is_overdue() -> None:
    """As Slurm permits for some minutes, and after a machine was suspended. Nothing is expected to be left by then."""
    here, steps = replace(RUNNING, limit_left_s=-1.0), history(30)
    one, other = (outlook(0.0, here, steps, since_last_s, None) for since_last_s in (0.0, 1000.0))
    assert other.forecast.remaining_s == 0 < one.forecast.remaining_s
    for found in (one, other):
        assert "70 of its steps will be missing" in found.concerns[-1].text


def test_a_run_off_its_expectation() -> None:
    assert kinds(RUNNING, history(30), expected_s=1.5) == ["off_expectation"]
    assert kinds(RUNNING, history(8), expected_s=1.5) == []
    assert kinds(RUNNING, history(30), expected_s=2.5) == []


def test_steps_that_became_slower() -> None:
    steps = history(40)
    for later in history(15, 2.2).steps:
        steps.add(later._replace(step=40 + later.step))
    assert kinds(RUNNING, steps) == ["slowed_down"]


def with_layers(count: int, slowest: Callable[[int], int], layer_s_max: float = 0.012) -> StepHistory:
    """Steps of llmb's engine, which times the layers of each rank."""
    found = history(count)
    for number, news in enumerate(found.steps):
        timed = {"layer_s_median": 0.01, "layer_s_max": layer_s_max, "slowest_layer_rank": slowest(number)}
        found.steps[number] = news._replace(whole=replace(step(number), **timed))
    return found


def test_a_slow_rank() -> None:
    work = Work(ranks=4, on_gpu=False, layer_passes=8, comparable_layers=True)
    here = replace(RUNNING, work=work, node_of={3: "node2"})
    (concern,) = outlook(0.0, here, with_layers(30, lambda _: 3), 0.0, None).concerns
    assert concern.kind == "slow_rank"
    assert concern.text.startswith("rank 3 on node2 is the slowest in 20 of 20 steps")
    assert kinds(here, with_layers(19, lambda _: 3)) == [], "too early to tell"
    assert kinds(here, with_layers(30, lambda _: 3, layer_s_max=0.0102)) == []
    assert kinds(here, with_layers(30, lambda number: number % 4)) == []
    assert kinds(RUNNING, with_layers(30, lambda _: 3)) == [], "layers of a log without a record are not known"


def test_a_new_attempt_begins_again() -> None:
    steps = history(30)
    steps.add(StepNews(30, 2.0, math.nan))
    for number in (10, 11, 12):
        steps.add(StepNews(number, 2.0, 4.0))
    assert [step.step for step in steps.steps] == [10, 11, 12]
    assert (steps.bad, steps.first_loss, steps.count) == (None, 4.0, 34)


def test_steps_of_earlier_attempts_do_not_set_the_pace() -> None:
    """``metrics.jsonl`` of a run that was started again begins with the steps that it keeps."""
    seen = outlook(0.0, replace(RUNNING, attempt=2, attempt_first_step=20), history(30), 0.0, None)
    assert seen.pace and seen.pace.first_step == 20
    assert seen.done == 30


def test_a_long_run_is_not_kept_whole() -> None:
    steps = history(3 * KEPT_STEPS)
    assert KEPT_STEPS <= len(steps.steps) <= 2 * KEPT_STEPS
    seen = outlook(0.0, replace(RUNNING, last_step=10**6), steps, 0.0, None)
    assert (seen.done, len(seen.steps)) == (3 * KEPT_STEPS, KEPT_STEPS)


class Script:
    """A subject whose looks are given."""

    def __init__(self, looks: list[tuple[Circumstances, list[StepNews]]], written_s: float = 0.0) -> None:
        self.looks = iter(looks)
        self.steps: list[StepNews] = []
        self.written = written_s

    def look(self, now_s: float) -> Circumstances:
        here, self.steps = next(self.looks)
        return here

    def new(self) -> "list[StepNews]":
        return self.steps

    def written_s(self) -> float:
        return self.written


def test_it_is_looked_at_until_it_ends() -> None:
    done = [StepNews(number, 1.0, 5.0) for number in range(3)]
    queued, ended = Circumstances(state="queued"), Circumstances(state="ended", last_step=99)
    looks = [(queued, []), (RUNNING, []), (RUNNING, done[:2]), (ended, done[2:])]
    shown: list[Outlook] = []
    paused: list[float] = []
    end = watch(Watcher(Script(looks)), shown.append, 3.0, paused.append)
    assert [seen.circumstances.state for seen in shown] == ["queued", "starting", "running", "ended"]
    assert paused == [3.0, 3.0, 3.0]
    assert end.done == 3, "steps that were done before the end are read"


def test_time_since_the_last_step_is_that_of_this_clock() -> None:
    """The clock of the host that writes may be wrong: only the first look has to trust it."""
    first = StepNews(0, 1.0, 5.0)
    looks = [(RUNNING, [first]), (RUNNING, []), (RUNNING, [first._replace(step=1)])]
    watcher = Watcher(Script(looks, written_s=990.0))
    assert [watcher.look(now_s).since_last_s for now_s in (1000.0, 1005.0, 1009.0)] == [10.0, 15.0, 0.0]
    ahead = Watcher(Script(looks, written_s=5000.0))
    assert ahead.look(1000.0).since_last_s == 0.0
