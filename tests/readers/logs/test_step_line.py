# SPDX-License-Identifier: Apache-2.0
"""Lines of steps and of checkpoints: ours, and those of the recipe documents."""

import math

import pytest
from checkpoint_lines import find_loads, find_saves
from hypothesis import given
from hypothesis import strategies as st

from llmb.readers.logs.formats.format import MAX_LINE_BYTES
from llmb.readers.logs.formats.nemo2 import Nemo2Reader
from llmb.readers.logs.step_line import (
    LoadLine,
    SaveLine,
    StepLine,
    format_load_line,
    format_save_line,
    format_step_line,
)

SEED_LINE = (
    "Training epoch 0, iteration 49/49 | lr: 4.491e-06 | global_batch_size: 256 | global_step: 49"
    " | peak_memory_usage: 72972500992 | memory_allocated: 34466545664 | reduced_train_loss: 12.81"
    " | train_step_timing in s: 2.693 | TFLOPS_per_GPU: 6.1e+02 | consumed_samples: 12800"
)

TFLOPS_LAST = SEED_LINE.replace(" | TFLOPS_per_GPU: 6.1e+02 | consumed_samples: 12800", "") + (
    " | consumed_samples: 12800 | TFLOPS_per_GPU: 6.1e+02"
)
LAST = StepLine(49, 49, 2.693, 12.81, 610.0, gbs=256, samples=12800)


def written(**changes):
    fields = {
        "step": 49,
        "steps": 50,
        "lr": 4.491e-06,
        "global_batch_size": 256,
        "peak_memory_bytes": 72972500992,
        "memory_allocated_bytes": 34466545664,
        "loss": 12.81,
        "step_time_s": 2.693,
        "tflops_per_gpu": 610.3,
        "consumed_samples": 12800,
    }
    return format_step_line(**fields | changes)


def at_step(step, line=SEED_LINE):
    return line.replace("49/49", f"{step}/49").replace("global_step: 49", f"global_step: {step}")


def read(line):
    return list(Nemo2Reader().find(line.encode() + b"\n"))


def test_the_written_line_is_that_of_the_seeds_but_for_finer_tflops():
    assert written() == SEED_LINE.replace("6.1e+02", "610.3")


def test_the_seeds_own_line_is_read():
    assert read(SEED_LINE) == [LAST]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00012345, "0.0001234"),
        (1e-7, "0.0000001000"),
        (0.5, "0.5000"),
        (2.6934, "2.693"),
        (12.3912, "12.391"),
        (1234.5678, "1234.568"),
        (1e7, "10000000.000"),
    ],
)
def test_step_times_never_have_an_exponent(seconds, text):
    assert f"train_step_timing in s: {text} |" in written(step_time_s=seconds)


def test_unknown_fields_are_left_out():
    line = written(tflops_per_gpu=None, peak_memory_bytes=None, memory_allocated_bytes=None)
    assert "TFLOPS" not in line
    assert "memory" not in line
    assert read(line) == [LAST._replace(tflops_per_gpu=None)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_written_as_nan(loss):
    assert "reduced_train_loss: nan |" in written(loss=loss)


numbers = st.floats(min_value=1e-6, max_value=1e6)


@given(step=st.integers(0, 10**6), more=st.integers(1, 10**6), time=numbers, loss=numbers, tflops=st.none() | numbers)
def test_what_is_written_is_read_back(step, more, time, loss, tflops):
    (found,) = read(written(step=step, steps=step + more, step_time_s=time, loss=loss, tflops_per_gpu=tflops))
    assert (found.step, found.last) == (step, step + more - 1)
    assert found.step_time_s == pytest.approx(time, rel=5.1e-4)
    assert found.loss == pytest.approx(loss, rel=5.1e-4)
    assert found.tflops_per_gpu == (None if tflops is None else pytest.approx(tflops, rel=5.1e-4))


@given(st.permutations([*SEED_LINE.split(" | ")[1:], "val_loss: 11.2", "max_memory_reserved: 7.5e10"]))
def test_fields_may_come_in_any_order(fields):
    assert read(" | ".join(["Training epoch 0, iteration 49/49", *fields])) == [LAST]


@pytest.mark.parametrize("prefix", ["0: ", "[rank0]: ", "\x1b[32mINFO\x1b[0m ", "Epoch 0: 10%|# |\r"])
def test_a_prefix_does_not_matter(prefix):
    assert len(read(prefix + SEED_LINE)) == 1


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends(end):
    assert len(list(Nemo2Reader().find((SEED_LINE.encode() + end) * 3))) == 3


@pytest.mark.parametrize(
    ("text", "value"), [("1.2e-1", 0.12), ("2E+0", 2.0), ("inf", math.inf), ("nan", math.nan), ("5", 5.0)]
)
def test_numbers_in_other_notations(text, value):
    (found,) = read(SEED_LINE.replace("2.693", text).replace("12.81", text))
    assert found.step_time_s == pytest.approx(value, nan_ok=True)
    assert found.loss == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    "line",
    [
        "Validation: iteration 1/32",
        "Training epoch 0, iteration 1/49 | lr: 0.1",
        "train_step_timing in s: 2.693 | consumed_samples: 256",
        SEED_LINE.replace("2.693", "fast"),
        SEED_LINE.replace("49/49", "49/x"),
        SEED_LINE.replace("lr: 4.491e-06", "lr: " + "0" * MAX_LINE_BYTES),
    ],
)
def test_other_lines_are_none(line):
    assert read(line) == []


def test_a_line_cut_by_the_next_attempt_does_not_take_its_values():
    assert read(SEED_LINE[:120] + at_step(0)) == [LAST._replace(step=0)]


def test_the_line_end_tells_that_the_last_of_joined_lines_is_whole():
    assert [step.step for step in read(at_step(48, TFLOPS_LAST) + TFLOPS_LAST)] == [49]


def test_whole_lines_without_a_line_end_between_them_all_count():
    assert [step.step for step in read(at_step(48) + SEED_LINE)] == [48, 49]


def test_an_unended_line_counts_when_all_of_it_is_there():
    assert Nemo2Reader().find_unended(SEED_LINE.encode()) == ([LAST._replace(samples=None)], False)
    assert Nemo2Reader().find_unended(b"the end") == ([], False)


@pytest.mark.parametrize("line", [SEED_LINE, TFLOPS_LAST])
def test_a_line_cut_anywhere_is_noted_or_right(line):
    for cut in range(len("Training epoch "), len(line)):
        steps, was_cut = Nemo2Reader().find_unended(line[:cut].encode())
        assert was_cut is not bool(steps), cut
        for step in steps:
            assert step[:4] == (49, 49, 2.693, 12.81)
            assert step.tflops_per_gpu in (610.0, None)


def test_a_line_cut_before_its_last_fields_is_noted():
    line = SEED_LINE.replace(" | TFLOPS", " | max_memory_reserved: 75000 | TFLOPS")
    assert Nemo2Reader().find_unended(line[: line.index("000 | TFLOPS")].encode()) == ([], True)


PUBLISHED_SAVE = (
    b"[NeMo I 2025-04-11 14:48:45 nemo_logging:393] Global Checkpoint Save : Rank: 0 : Iteration: 50"
    b" : Start time: 1744408121.151s : Save duration: 4.389s"
)
PUBLISHED_LOAD = (
    b"[NeMo I 2025-04-11 14:46:18 nemo_logging:393] Global Checkpoint Load : Rank : 0"
    b" : Start time : 1744407969.270s : Time spent in load_checkpoint: 9.712s"
)
counts = st.integers(min_value=0, max_value=10**8)
seconds = st.integers(min_value=0, max_value=10**13).map(lambda milliseconds: milliseconds / 1000)


def test_the_published_lines_are_read():
    text = PUBLISHED_LOAD + b"\nsomething else\n" + PUBLISHED_SAVE + b"\n"
    assert list(find_saves(text)) == [SaveLine(0, 50, 1744408121.151, 4.389)]
    assert list(find_loads(text)) == [LoadLine(0, 1744407969.27, 9.712)]


def test_our_lines_have_the_published_wording():
    assert PUBLISHED_SAVE.decode().endswith("] " + format_save_line(SaveLine(0, 50, 1744408121.151, 4.389)))
    assert PUBLISHED_LOAD.decode().endswith("] " + format_load_line(LoadLine(0, 1744407969.27, 9.712)))


@given(st.builds(SaveLine, counts, counts, seconds, seconds), st.builds(LoadLine, counts, seconds, seconds))
def test_what_is_written_is_read(save, load):
    text = f"0: {format_save_line(save)}\n{format_load_line(load)}\r\n".encode()
    assert list(find_saves(text)) == [save]
    assert list(find_loads(text)) == [load]
