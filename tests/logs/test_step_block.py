# SPDX-License-Identifier: Apache-2.0
"""Text that is taken as a block gives what its lines give."""

import io
import math
from dataclasses import asdict

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from llmb.logs import step_block
from llmb.logs.formats import nemo2
from llmb.logs.formats.nemo2 import MAX_BODY_BYTES, STEP_TIME_FIELD, TFLOPS_FIELD, Nemo2Reader
from llmb.logs.logged_attempt import LoggedAttempt
from llmb.logs.reader import read_log
from llmb.logs.step_block import find_block

SHAPES = (
    "lr: 4.491e-06 | global_step: {step} | reduced_train_loss: {loss} | train_step_timing in s: {time}"
    " | TFLOPS_per_GPU: {tflops} | consumed_samples: {step}",
    "lr: 0.001 | reduced_train_loss: {loss} | train_step_timing in s: {time} | val_loss: 3 | max_memory: 5"
    " | consumed_samples: {step}",
    "train_step_timing in s: {time} | reduced_train_loss: {loss} | consumed_samples: 8 | TFLOPS_per_GPU: {tflops}",
    "train_step_timing in s: {time} | TFLOPS_per_GPU: {tflops} | consumed_samples: {step}",
    "lr: 4e-06 | global_step: {step} | train_step_timing in s: {time} | reduced_train_loss: {loss}"
    " | TFLOPS_per_GPU: {tflops} | consumed_samples: {step}",
)


def line(step, last=49, *, shape=SHAPES[0], loss="12.5", time="2.5", tflops="6.1e+02"):
    return f"Training epoch 0, iteration {step}/{last} | " + shape.format(
        step=step, loss=loss, time=time, tflops=tflops
    )


def found(lines, end="\n"):
    text = ("\n" + "".join(text + end for text in lines)).encode()
    return find_block(text, 1, len(text))


def test_consecutive_lines_are_a_block():
    block = found(
        line(step, loss=12 - step / 10, time=f"{2 + step / 10:.4g}", tflops=500 + step) for step in range(10, 30)
    )
    assert (block.first.step, block.final.step, block.count, block.first.last) == (10, 29, 20, 49)
    assert (block.first.loss, block.final.loss) == (11, 9.1)
    assert block.column(STEP_TIME_FIELD) == pytest.approx([2 + step / 10 for step in range(10, 30)])
    assert list(block.column(TFLOPS_FIELD)) == [500 + step for step in range(10, 30)]


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[4]])
def test_fields_may_be_in_any_place_and_tflops_missing(shape):
    block = found(line(step, shape=shape) for step in range(10, 30))
    assert list(block.column(STEP_TIME_FIELD)) == [2.5] * 20
    tflops = list(block.column(TFLOPS_FIELD))
    assert tflops == [610.0] * 20 or (shape == SHAPES[1] and all(map(math.isnan, tflops)))


def test_a_prefix_that_all_lines_have_does_not_matter():
    assert found("[rank0]: " + line(step) for step in range(10, 30)).count == 20


def edited(where, change, *, shape=SHAPES[0]):
    lines = [line(step, shape=shape) for step in range(10, 30)]
    lines[where] = change(lines[where])
    return lines


@pytest.mark.parametrize("where", [0, 1, 10, 19])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("12.5", "nan"),
        lambda text: text.replace("12.5", "-inf"),
        lambda text: text.replace("2.5 |", "INF |"),
        lambda text: text.replace("6.1e+02", "None"),
        lambda text: text.replace("reduced_train_loss", "reduced_train_lass"),
        lambda text: text.replace("train_step_timing", "train_step_time_in"),
        lambda text: text.replace("Training epoch 0", "Training epoch 1"),
        lambda text: text.replace("/49", "/59"),
        lambda text: text.replace(" | consumed", " | more: 1 | consumed"),
        lambda text: text[:60],
        lambda text: text[:60] + text,
        lambda text: text + "\n" + text,
        lambda text: text + "\nNCCL INFO",
        lambda text: text + "\r",
        lambda text: text.replace("lr: ", "lr: " + "0" * MAX_BODY_BYTES),
        lambda text: "0: " + text,
    ],
)
def test_one_odd_line_is_enough_to_refuse(where, change):
    assert found(edited(where, change)) is None


def test_a_step_left_out_or_out_of_order_is_enough_to_refuse():
    lines = [line(step) for step in range(10, 30)]
    assert found(lines[:5] + lines[6:]) is None
    assert found(lines[:5] + lines[4:10] + lines[11:]) is None, "as many lines as steps, yet not each once"
    assert found([*lines[:5], lines[6], lines[5], *lines[7:]]) is None
    assert found([line(step) for step in range(8, 12)]) is None, "numbers of another width are left to the reader"


def test_other_characters_do_not_pass_for_a_step_number():
    lines = [line(step) for step in range(10, 30)]
    assert found([*lines[:10], lines[10].replace("iteration 20/", "iteration 1:/"), *lines[11:]]) is None


def test_a_last_line_with_other_fields_is_enough_to_refuse():
    lines = [line(step, shape=SHAPES[2]) for step in range(10, 30)]
    other = "train_step_timing in s: {time} | reduced_train_loss: {loss} | TFLOPS_per_GPU: {tflops} | x: 1"
    assert found([*lines[:-1], line(29, shape=other)]) is None


def test_a_block_has_a_loss():
    assert found(line(step, shape=SHAPES[3]) for step in range(10, 30)) is None


@pytest.mark.parametrize(("time", "column"), [("999.999", [999.999] * 20), ("1000.001", None)])
def test_longer_values_are_left_to_the_reader(time, column):
    values = found(line(step, time=time) for step in range(10, 30)).column(STEP_TIME_FIELD)
    assert (values if values is None else list(values)) == column


def test_what_is_no_number_gives_no_column():
    block = found(edited(7, lambda text: text.replace("2.5 |", "2.5s |")))
    assert block.column(STEP_TIME_FIELD) is None
    block = found(edited(7, lambda text: text.replace("val_loss: 3", "TFLOPS_per_GPU: 3"), shape=SHAPES[1]))
    assert block.column(TFLOPS_FIELD) is None


def test_a_block_that_begins_with_the_step_before_is_left_to_the_reader():
    block = found(line(step) for step in range(10, 30))
    upto = LoggedAttempt("all")
    upto.add_lines([block.first])
    assert not upto.add_block(block)
    assert (upto.number, upto.steps, upto.max_step, list(upto.step)) == (1, 1, 10, [10])
    after = LoggedAttempt("all")
    after.add_lines([block.first._replace(step=9)])
    assert after.add_block(block)
    after.settle()
    assert (after.number, after.steps, after.max_step, list(after.step)) == (1, 21, 29, list(range(9, 30)))


def test_a_long_log_of_one_shape_is_hardly_read_by_its_lines(monkeypatch):
    by_line = []
    find = Nemo2Reader.find
    monkeypatch.setattr(Nemo2Reader, "find", lambda *text: by_line.append(list(find(*text))) or by_line[-1])
    text = "\n".join(line(step, 9999) for step in range(10_000)).encode()
    log = read_log(io.BytesIO(text), "reference", 1 << 15)
    assert (log.attempt.steps, len(log.attempt.step)) == (10_000, 2000)
    assert sum(map(len, by_line)) < 1000


numbers = st.sampled_from(["12.5", "2.5", "7", "0.001", "6.1e+02", "12.25", "1e5", "1234.567"])
odd_numbers = st.sampled_from(["nan", "inf", "-inf", "NaN", "Infinity", "-1.5", ".5", "+2", "None", "", "2.5 s"])


@st.composite
def stretches(draw):
    """The lines of some steps in order, of one shape and with numbers that vary, now and then with something odd."""
    first, last = draw(st.integers(0, 99)), draw(st.sampled_from([49, 99, 99, 99]))
    steps = range(first, first + draw(st.integers(1, 40)), draw(st.sampled_from([1, 1, 1, 2])))
    shape, prefix = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(["", "", "0: ", "[rank0]: "]))
    values = draw(st.lists(st.fixed_dictionaries(dict.fromkeys(("loss", "time", "tflops"), numbers)), min_size=1))
    lines = [prefix + line(step, last, shape=shape, **values[step % len(values)]) for step in steps]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = draw(st.sampled_from(ODDITIES))(lines[at], draw(odd_numbers))
    return draw(st.sampled_from(["\n", "\n", "\n", "\r\n", "\r"])).join([*lines, ""])


ODDITIES = (
    lambda text, odd: text.replace("loss: 12.5", f"loss: {odd}"),
    lambda text, odd: text.replace("timing in s: 2.5", f"timing in s: {odd}"),
    lambda text, odd: text.replace("GPU: 6.1e+02", f"GPU: {odd}"),
    lambda text, odd: text.replace("loss: 12.5", f"loss: 12.5 | more: {odd}"),
    lambda text, odd: text.replace("/99", "/79"),
    lambda text, odd: text.replace(" | ", "\n", 1),
    lambda text, odd: text[:90],
    lambda text, odd: text[:90] + text,
    lambda text, odd: text + text,
    lambda text, odd: text + "\n" + text,
    lambda text, odd: text + "\nslow data loader",
    lambda text, odd: "",
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(stretches(), min_size=1, max_size=5).map("".join),
    st.integers(100, 6000),
    st.sampled_from(["reference", "reference", "last", "all", "3-47"]),
)
def test_blocks_do_not_change_what_is_read(text, chunk_bytes, rule):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_block, "find_block", lambda *text: None)
        patch.setattr(nemo2, "find_usual", lambda *text: None)
        whole = read_log(io.BytesIO(text.encode()), rule)
    blocks = []
    with pytest.MonkeyPatch.context() as patch:
        add_block = LoggedAttempt.add_block
        patch.setattr(LoggedAttempt, "add_block", lambda self, block: add_block(self, block) and not blocks.append(1))
        pieces = read_log(io.BytesIO(text.encode()), rule, chunk_bytes)
    event("with blocks" if blocks else "without blocks")
    assert repr(asdict(pieces)) == repr(asdict(whole))


def test_a_line_that_another_runs_into_is_no_block() -> None:
    fields = "train_step_timing in s: 12.5 | reduced_train_loss: 12.5"
    more = " | consumed_samples: 8 | TFLOPS_per_GPU: 12.5"
    heads = [f"Training epoch 0, iteration {step}/49 | {fields}" for step in range(3)]
    text = f"{'x' * 100}\n{heads[0]}{more}\n{heads[1]}{heads[1]}{more}\n{heads[2]}\n"
    counts = {read_log(io.BytesIO(text.encode()), "reference", size).attempt.steps for size in range(60, len(text) + 1)}
    assert counts == {3}
