# SPDX-License-Identifier: Apache-2.0
"""Reading a stream: chunks, memory, attempts, and bytes of any kind."""

import io
import math
import tracemalloc
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_lines import step_line

from llmb.logs.reader import CHUNK_BYTES, read_log


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
