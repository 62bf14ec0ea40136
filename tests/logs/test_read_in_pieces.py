# SPDX-License-Identifier: Apache-2.0
"""A log is read alike whatever the size of the pieces that it is read in."""

import io
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.logs.reader import read_log

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
@settings(max_examples=60, deadline=None)
@given(
    st.lists(stretches(), min_size=1, max_size=5).map("".join),
    st.integers(100, 6000),
    st.sampled_from(["reference", "reference", "last", "all", "3-47"]),
)
def test_pieces_do_not_change_what_is_read(text, chunk_bytes, rule):
    whole = read_log(io.BytesIO(text.encode()), rule)
    pieces = read_log(io.BytesIO(text.encode()), rule, chunk_bytes)
    assert repr(asdict(pieces)) == repr(asdict(whole))


def test_a_line_that_another_runs_into_counts_once() -> None:
    fields = "train_step_timing in s: 12.5 | reduced_train_loss: 12.5"
    more = " | consumed_samples: 8 | TFLOPS_per_GPU: 12.5"
    heads = [f"Training epoch 0, iteration {step}/49 | {fields}" for step in range(3)]
    text = f"{'x' * 100}\n{heads[0]}{more}\n{heads[1]}{heads[1]}{more}\n{heads[2]}\n"
    counts = {read_log(io.BytesIO(text.encode()), "reference", size).attempt.steps for size in range(60, len(text) + 1)}
    assert counts == {3}
