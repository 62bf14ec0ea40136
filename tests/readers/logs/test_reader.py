# SPDX-License-Identifier: Apache-2.0
"""Reading a stream: chunks and pieces, memory, attempts, and bytes of any kind."""

import io
import math
import tracemalloc
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_lines import step_line

from llmb.readers.logs.reader import CHUNK_BYTES, read_log


def line(step, steps=50, *, loss=12.5, time=2.5, tflops=600.0):
    return step_line(step, steps, loss=loss, step_time_s=time, tflops_per_gpu=tflops).rstrip("\n").encode()


def read(text, chunk_bytes=CHUNK_BYTES, rule="all"):
    return read_log(io.BytesIO(text), rule, chunk_bytes)


def plain(log):
    """All of a log, comparable: nan equals nan."""
    return repr(asdict(log))


noise = st.sampled_from(
    [
        b"",
        b"NCCL INFO AllReduce: opCount 2\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"Training epoch ",
        b"Training epoch 0, iteration 3/49 |",
        b"train_step_timing in s: 7",
        b"x" * 4040,
        b"\xff\xfe\x00\x80",
        "Schrittzeit \u00fc \u2713\n".encode(),
    ]
)
step_lines = st.builds(
    line, st.integers(0, 60), loss=st.sampled_from([1.5, math.nan]), tflops=st.sampled_from([None, 9.0])
)
pieces = st.lists(noise | st.binary(max_size=30) | st.builds(bytes.__add__, step_lines, noise), max_size=12)


@settings(max_examples=60, deadline=None)
@given(pieces.map(b"".join), st.integers(1, 9000))
def test_chunks_do_not_change_what_is_read(text, chunk_bytes):
    assert plain(read(text, chunk_bytes)) == plain(read(text))


def test_the_longest_lines_are_read_whatever_the_chunks():
    longest = line(7).replace(b"lr: ", b"lr: " + b"0" * (4000 - len(line(7))))
    for chunk_bytes in range(1, 9000, 41):
        assert list(read(b"noise\n" + longest + b"\nnoise", chunk_bytes).attempt.step) == [7]


@settings(deadline=None)
@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=30), st.sampled_from([b"\n", b"\r\n", b"\nnoise\n"]))
def test_a_run_is_read_back(times, end):
    lines = [line(step, len(times), time=time, loss=time) for step, time in enumerate(times)]
    log = read(end.join(lines))
    attempt = log.attempt
    assert list(attempt.step) == list(range(len(times)))
    assert list(attempt.step_time_s) == pytest.approx(times, rel=5.1e-4)
    assert list(attempt.tflops_per_gpu) == [600.0] * len(times)
    assert (attempt.last, attempt.number, log.truncated_line) == (len(times) - 1, 1, False)
    assert (attempt.steps, attempt.max_step) == (len(times), len(times) - 1)
    upto = [read(end.join(lines[: count + 1])).attempt for count in range(len(lines))]
    assert [part.loss_last for part in upto] == pytest.approx(times, rel=5.1e-4)
    assert [part.loss_first for part in upto] == pytest.approx([times[0]] * len(times), rel=5.1e-4)


@given(st.data())
def test_a_file_cut_anywhere_keeps_the_steps_before_the_cut(data):
    whole = b"".join(line(step, 5) + b"\n" for step in range(5))
    cut = data.draw(st.integers(0, len(whole)))
    log = read(whole[:cut])
    attempt = log.attempt
    complete = whole[:cut].count(b"\n")
    assert len(attempt.step) in (complete, complete + 1)
    assert set(attempt.step_time_s) <= {2.5}
    assert set(attempt.tflops_per_gpu) <= {600.0}
    assert list(attempt.step) == list(range(len(attempt.step)))
    assert not (log.truncated_line and len(attempt.step) > complete)


@given(st.binary(max_size=5000))
def test_any_bytes_are_read(text):
    log = read(text)
    assert log.size == len(text)
    assert log.attempt.last is None


def test_only_the_last_attempt_is_kept():
    first = [line(step, loss=math.nan) for step in range(30)]
    second = [line(step, time=3.0) for step in range(20, 50)]
    attempt = read(b"\n".join([*first, b"restarted", *second])).attempt
    assert (attempt.number, attempt.bad_loss_step) == (2, None)
    assert list(attempt.step) == list(range(20, 50))
    assert set(attempt.step_time_s) == {3.0}


def test_an_attempt_that_declares_another_length_counts_as_declared():
    attempt = read(b"\n".join([line(7, 20), line(0, 30), line(1, 30)])).attempt
    assert (attempt.last, list(attempt.step)) == (29, [0, 1])


def test_a_length_declared_midway_moves_the_window_to_steps_gone_by():
    lines = [line(step, 100 if step < 45 else 50) for step in range(50)]
    attempt = read(b"\n".join(lines), rule="reference").attempt
    assert (attempt.last, attempt.number, attempt.steps) == (49, 1, 50)
    assert list(attempt.step) == list(range(35, 45))


def test_a_step_that_several_ranks_log_counts_once():
    attempt = read(b"\n".join(b"%d: %s" % (rank, line(step)) for step in range(3) for rank in range(4))).attempt
    assert (attempt.number, list(attempt.step)) == (1, [0, 1, 2])


def test_the_first_bad_loss_is_found():
    attempt = read(b"\n".join(line(step, loss=math.nan if step >= 12 else 1.0) for step in range(50))).attempt
    assert attempt.bad_loss_step == 12


def test_a_missing_field_is_not_a_bad_one():
    text = line(0).replace(b"reduced_train_loss", b"other").replace(b"TFLOPS_per_GPU", b"another") + b"\n"
    attempt = read(text).attempt
    assert attempt.bad_loss_step is None
    assert math.isnan(attempt.loss_first)
    assert math.isnan(attempt.tflops_per_gpu[0])


def test_only_the_steps_of_the_window_are_kept():
    attempt = read(b"\n".join(line(step) for step in range(50)), rule="3-7").attempt
    assert (attempt.steps, list(attempt.step)) == (50, [3, 4, 5, 6, 7])
    assert len(attempt.step_time_s) == len(attempt.tflops_per_gpu) == 5


def test_an_empty_stream():
    log = read(b"")
    assert (log.size, log.attempt.last, log.attempt.number, log.head, log.tail) == (0, None, 0, b"", b"")


class Repeated(io.RawIOBase):
    """A stream of one chunk over and over."""

    def __init__(self, chunk, count):
        self.chunk, self.count = chunk, count

    def read(self, size=-1):
        self.count -= 1
        return self.chunk if self.count >= 0 else b""


@pytest.mark.parametrize(
    ("chunk", "count"),
    [
        (b"x" * CHUNK_BYTES, 40),
        (b"NCCL INFO AllReduce\n" * 10_000, 20),
        (b"Training epoch 0, iteration 1/9 | " * 100 + b"x" * CHUNK_BYTES, 20),
        ((line(0) + b"\n") * 900, 15),
    ],
    ids=["one line", "other lines", "long lines", "steps"],
)
def test_memory_does_not_grow_with_the_file(chunk, count):
    tracemalloc.start()
    try:
        log = read_log(Repeated(chunk, count), "all")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert log.size == count * len(chunk)
    assert peak < 4 * CHUNK_BYTES


class Steps(io.RawIOBase):
    """A stream of the lines of steps 0, 1, 2, ..."""

    def __init__(self, count):
        self.count, self.step, self.left = count, 0, b""

    def read(self, size=-1):
        while len(self.left) < size and self.step < self.count:
            self.left += (
                b"Training epoch 0, iteration %d/%d | reduced_train_loss: 1.5 | train_step_timing in s: 2.5"
                b" | TFLOPS_per_GPU: 600 | consumed_samples: 8\n" % (self.step, self.count - 1)
            )
            self.step += 1
        text, self.left = self.left[:size], self.left[size:]
        return text


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps_outside_the_window():
    tracemalloc.start()
    try:
        log = read_log(Steps(30_000), "5-9", 1 << 14)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (log.attempt.steps, list(log.attempt.step)) == (30_000, [5, 6, 7, 8, 9])
    assert peak < 30_000 * 8


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


def shaped_line(step, last=49, *, shape=SHAPES[0], loss="12.5", time="2.5", tflops="6.1e+02"):
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
    lines = [prefix + shaped_line(step, last, shape=shape, **values[step % len(values)]) for step in steps]
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
