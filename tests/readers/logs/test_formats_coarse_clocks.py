# SPDX-License-Identifier: Apache-2.0
"""Progress bars, whose clock shows whole seconds: what is known of step times, and which bars are of one training."""

import io
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.readers.logs.log_files import parse_file
from llmb.readers.logs.outcome import WIDEST_CLOCK_ERROR, judge_log
from llmb.readers.logs.reader import read_log
from llmb.reports.parse_report import time_fields


def judged(text, rule="reference"):
    return judge_log(read_log(io.BytesIO(text.encode()), rule))


def bars(times_s, total=None, *, start=0, least_s=0.1, rate="?it/s"):
    """The bars of a run whose steps end at ``times_s``: tqdm prints one at most every 0.1 s."""
    total = total or start + len(times_s)
    text, printed_s = f"\r  0%|          | 0/{total} [00:00<?, ?it/s]", 0.0
    for step, time_s in enumerate(times_s, start + 1):
        if time_s - printed_s >= least_s or step == total:
            text += bar(step, total, time_s, rate)
            printed_s = time_s
    return text + "\n"


def bar(step, total, time_s, rate="?it/s"):
    clock = f"{int(time_s) // 60:02d}:{int(time_s) % 60:02d}"
    return f"\r{100 * step // total:3d}%|#         | {step}/{total} [{clock}<00:20,  {rate}]"


def even(steps, seconds, first_s=0.0):
    return [first_s + seconds * (step + 1) for step in range(steps)]


def end(steps, seconds):
    return (
        f"{{'train_runtime': '{seconds:.4g}', 'train_samples_per_second': '8', "
        f"'train_steps_per_second': '{steps / seconds:.4g}', 'train_loss': '2.3', 'epoch': '1'}}\n"
    )


VALUES = "{'loss': '2.31', 'grad_norm': '1.9', 'learning_rate': '4.5e-05', 'epoch': '0.1'}\n"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 3.0), min_size=30, max_size=150), st.sampled_from(["reference", "all"]))
@example([1.0] * 51 + [3.0] * 4 + [0.0625] + [1.0] * 8, "reference")  # a bar for two steps ends after the window
def test_a_figure_is_within_its_interval_or_there_is_none(seconds, rule):
    ends = [math.fsum(seconds[: step + 1]) for step in range(len(seconds))]
    found = judged(bars(ends) + VALUES + end(len(seconds), ends[-1]), rule)
    if found.step_time_s is None:
        assert found.status == "too_few_steps", found.reason
        return
    first, last = found.window.first, found.window.last
    truth = (ends[last - 1] - (ends[first - 2] if first > 1 else 0.0)) / (last - first + 1)
    assert found.step_time_s.count == last - first + 1
    assert abs(found.step_time_s.mean - truth) <= found.clock_error_s + 1e-9
    assert found.clock_error_s <= WIDEST_CLOCK_ERROR * found.step_time_s.mean
    assert found.step_time_s.ci95[0] <= truth <= found.step_time_s.ci95[1]


def test_steps_that_are_too_fast_for_the_clock_have_no_figure():
    """40 steps of 0.1 s: by the clock some take 0 s, and some 1 s."""
    found = judged(bars(even(40, 0.1)) + VALUES + end(40, 4.0), "all")
    assert (found.status, found.step_time_s) == ("too_few_steps", None)
    assert found.reason.startswith("the log's clock shows whole seconds: 40 steps in 4 s, ±25 %")


def test_what_a_coarse_clock_does_not_tell_is_unknown():
    found = judged(bars(even(100, 2.4)) + VALUES + end(100, 240.0))
    times = found.step_time_s
    assert found.status == "success" and times.mean == pytest.approx(2.4, abs=0.05)
    assert (times.std, times.cv, *(time_fields(found)[key] for key in ("median", "min", "max"))) == (None,) * 5
    assert (times.count, found.clock_error_s, found.step_times_s) == (20, 0.05, ())
    assert "±0.05 s" in found.reason


def test_fast_steps_without_a_bar_that_moves_have_the_mean_of_the_run():
    found = judged(bars(even(20, 0.001)) + VALUES + end(20, 0.02), "all")
    assert (found.status, found.step_time_s.count) == ("success", 20)
    assert found.step_time_s.mean == pytest.approx(0.001)


@pytest.mark.parametrize("header", ["", "  Continuing training from global step 30\n"])
def test_a_run_that_resumes_is_timed_from_there(header):
    found = judged(header + bars(even(20, 2.0), start=30) + VALUES + end(20, 40.0), "all")
    assert (found.status, found.window.first, found.window.last) == ("success", 31, 50)
    assert abs(found.step_time_s.mean - 2) <= found.clock_error_s


def test_a_run_that_resumes_with_fast_steps_is_no_run_of_all_its_steps():
    """Only the header of transformers 4 tells; the runtime is of 20 steps, and not of 50."""
    header = "  Total optimization steps = 50\n  Continuing training from global step 30\n"
    found = judged(header + bars(even(20, 0.001), start=30) + VALUES + end(50, 0.02), "all")
    assert (found.step_time_s.mean, found.window.first) == (0.001, 31)


def test_a_run_that_resumed_by_its_epochs_has_no_mean_of_all_its_steps():
    values = "".join(
        f"{{'loss': 2.31, 'grad_norm': 1.9, 'learning_rate': 4.5e-05, 'epoch': {n / 50}}}\n" for n in (31, 32)
    )
    assert judged(values + end(50, 40.0), "all").step_time_s is None


def test_a_second_training_of_the_same_length_is_another_attempt():
    first, second = bars(even(50, 1.0)), bars(even(50, 3.0))
    found = judged(first + second + VALUES + end(50, 50.0) + VALUES + end(50, 150.0))
    assert (found.status, found.attempts) == ("success", 2)
    assert abs(found.step_time_s.mean - 3) <= found.clock_error_s


@pytest.mark.parametrize("steps", [20, 80])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_second_training_of_another_length_is_refused(tmp_path, steps, buffered):
    first, second = bars(even(50, 1.0)), bars(even(steps, 3.0))
    ends = [VALUES + end(50, 50.0), VALUES + end(steps, 3.0 * steps)]
    log = tmp_path / "log.out"
    log.write_text(first + second + "".join(ends) if buffered else first + ends[0] + second + ends[1])
    found = parse_file(log, "reference").outcome
    assert (found.status, found.step_time_s) == ("unreadable", None)
    assert "progress bars of" in found.reason


def test_an_evaluation_does_not_disturb():
    halves = [bars(even(50, 2.0)).partition("\r 50%")[part] for part in (0, 2)]
    text = halves[0] + bars(even(13, 0.5)) + "\r 50%" + halves[1] + bars(even(13, 0.5)) + VALUES + end(50, 100.0)
    found = judged(text, "all")
    assert (found.status, found.step_time_s.count) == ("success", 50)


def evaluation(seconds):
    return (
        f"{{'eval_loss': '6.24', 'eval_runtime': '{seconds}', 'eval_samples_per_second': '8', "
        "'eval_steps_per_second': '0.5', 'epoch': '0.5'}\n"
    )


@pytest.mark.parametrize("header", ["", "  Total optimization steps = 100\n"])
@pytest.mark.parametrize("least_s", [8, 90, 300])
def test_steps_before_the_first_of_rare_bars_count(header, least_s):
    """As a terminal's record has them, a collector of logs, or TQDM_MININTERVAL."""
    found = judged(header + bars(even(100, 5.0), least_s=least_s, rate="5.00s/it") + VALUES + end(100, 500.0), "all")
    assert (found.status, found.step_time_s.count, found.step_time_s.mean, found.warnings) == ("success", 100, 5.0, ())


def test_the_only_bar_that_moves_is_the_mean_of_the_run():
    found = judged(bars(even(100, 5.0), least_s=1e9) + VALUES + end(100, 500.0), "all")
    assert (found.status, found.step_time_s.count, found.step_time_s.mean) == ("success", 100, 5.0)


@pytest.mark.parametrize(("skipped_s", "first"), [(0.0, 31), (60.0, 32)])
def test_a_slow_first_step_of_a_run_that_resumes_is_told_from_many_steps(skipped_s, first):
    """60 s in which the data that was seen is skipped are neither 31 steps nor one."""
    text = bars(even(20, 4.0, skipped_s), start=30) + VALUES + end(20, 80.0 + skipped_s)
    found = judged(text, "all")
    assert (found.status, found.window.first, found.step_time_s.mean) == ("success", first, 4.0)


def test_rare_bars_of_a_run_that_resumes_are_timed_from_the_first_one():
    found = judged(bars(even(60, 2.0), start=40, least_s=20) + VALUES + end(60, 120.0), "all")
    assert (found.status, found.window.first, found.step_time_s.mean) == ("success", 51, 2.0)


@pytest.mark.parametrize("length", [13, 40])
@pytest.mark.parametrize("logged", ["at once", "late", "never"])
@pytest.mark.parametrize("least_s", [0.1, 25])
def test_the_time_of_an_evaluation_is_left_out(length, logged, least_s):
    """Two of 2 s a step lie in a training of 40 steps of 10 s, as long as it or shorter. What it logs prints all bars
    again."""
    seconds, line = 2.0 * length, evaluation(2.0 * length)
    text = bars(even(20, 10.0), 40, least_s=least_s)
    text += "\n" + bars(even(length, 2.0), least_s=least_s)
    text += (line if logged == "at once" else "") + bar(20, 40, 200 + seconds) + bar(length, length, seconds)
    second = bars(even(20, 10.0, 200 + seconds), 40, start=20, least_s=least_s)
    text += second.partition("it/s]")[2]
    text += "\n" + bars(even(length, 2.0), least_s=least_s)
    text += (line if logged == "at once" else "") + bar(40, 40, 400 + 2 * seconds) + bar(length, length, seconds)
    text += (2 * line if logged == "late" else "") + VALUES + end(40, 400.0 + 2 * seconds)
    found = judged(text, "all")
    assert (found.status, found.attempts, found.step_time_s.count) == ("success", 1, 40), found.reason
    assert abs(found.step_time_s.mean - 10) <= found.clock_error_s
    assert found.left_out == f"without {seconds:.4g} s of evaluation"


def test_the_mean_of_a_run_without_bars_leaves_out_its_evaluations():
    before = evaluation(77).replace(", 'epoch': '0.5'", "")
    found = judged(before + VALUES + evaluation(32) + VALUES + evaluation(32) + end(100, 264.0), "all")
    assert (found.status, found.step_time_s.mean, found.left_out) == ("success", 2.0, "without 64 s of evaluation")


def test_bars_that_follow_what_was_logged_are_of_the_same_training():
    """Where the output and the errors of a job are one file, one after the other."""
    found = judged(VALUES + VALUES.replace("2.31", "1.5") + end(50, 100.0) + bars(even(50, 2.0)), "all")
    assert (found.status, found.attempts, found.step_time_s.count) == ("success", 1, 50)
    assert (found.step_time_s.mean, found.loss_last, found.left_out) == (2.0, 1.5, None)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (bars(even(50, 2.0), rate="9.00s/it") + end(50, 100.0), "2 s per step by the progress bar's clock, 9 s by its"),
        (bars(even(50, 2.0), rate="4.00it/s") + end(50, 100.0), "2 s per step by the progress bar's clock, 0.25 s by"),
        (bars(even(50, 2.0)) + end(50, 400.0), "2 s per step by the progress bar, 8 s by the runtime"),
        (bars(even(50, 2.0)) + end(50, 30.0), "2 s per step by the progress bar, 0.6 s by the runtime"),
        (VALUES + end(50, 400.0) + bars(even(50, 2.0)), "2 s per step by the progress bar, 8 s by the runtime"),
        (bars(even(50, 2.0)) + end(200, 100.0), "50 steps by the progress bar, 200 by the runtime and its rate"),
    ],
    ids=["low rate", "high rate", "long runtime", "short runtime", "bars last", "steps"],
)
def test_figures_that_contradict_the_bar_are_told(text, note):
    found = judged(text, "all")
    assert (found.step_time_s.mean, [note in warning for warning in found.warnings]) == (2.0, [True])


def test_an_evaluation_before_the_training_is_not_taken_for_it():
    text = bars(even(13, 2.0)) + bars(even(50, 2.0)) + VALUES + end(50, 100.0)
    with pytest.raises(UsageError, match="progress bars of 13, 50 steps"):
        judged(text)


def test_lines_count_as_many_times_as_the_steps_that_they_stand_for():
    """Megatron-LM logs the first iteration besides every tenth: the second line is the mean of nine."""

    def line(number, seconds):
        return f" iteration {number:8d}/      20 | elapsed time per iteration (ms): {1000 * seconds} | lm loss: 1.0 |\n"

    found = judged(line(1, 30.0) + line(10, 2.0) + line(20, 1.0), "all")
    assert (found.status, found.step_time_s.count) == ("success", 20)
    assert found.step_time_s.mean == pytest.approx((30 + 9 * 2 + 10) / 20)


@pytest.mark.parametrize("seconds", ["0.0", "0", "1e-400", "-1", "nan", "1e300"])
def test_a_step_time_that_no_step_has_is_invalid(tmp_path, seconds):
    line = "Training epoch 0, iteration {}/9 | reduced_train_loss: 2.5 | train_step_timing in s: {} | lr: 0.1\n"
    log = tmp_path / "log.out"
    log.write_text("".join(line.format(step, seconds) for step in range(10)))
    found = parse_file(log, "all").outcome
    assert (found.status, found.step_time_s) == ("invalid", None), found.reason
