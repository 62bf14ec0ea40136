# SPDX-License-Identifier: Apache-2.0
"""One log of each format: 50 steps, of which the n-th takes 2 + n/100 s, whatever the file went through before."""

import gzip
import io
import re
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.readers.logs.configuration import ARGUMENTS
from llmb.readers.logs.formats import FORMATS
from llmb.readers.logs.formats.nemo2 import Nemo2Reader
from llmb.readers.logs.log_files import parse_file
from llmb.readers.logs.outcome import judge_log
from llmb.readers.logs.reader import read_log

FOLDER = Path(__file__).parent / "samples"


class Sample(NamedTuple):
    format: str
    first: int
    """Number of the first step."""
    logged: tuple[int, ...]
    """The logged steps of the window 35-44."""
    times: tuple[float, ...]
    tflops: float | None
    configuration: tuple[tuple[str, object], ...] = ()


def layout(**sizes):
    return tuple((f"layout.{name}", size) for name, size in sizes.items())


FROM_0 = tuple(range(35, 45)), tuple(2.36 + n / 100 for n in range(10))
FROM_1 = tuple(range(35, 45)), tuple(2.35 + n / 100 for n in range(10))
SAMPLES = {
    "llmb": Sample("nemo2", 0, *FROM_0, 559.5),
    "nemo1": Sample("nemo1", 0, *FROM_0, None),
    "nemo2": Sample("nemo2", 0, *FROM_0, 560.0),  # two significant digits
    "megatron_lm": Sample(
        "megatron", 1, *FROM_1, 560.5, layout(gpus=64, tp=4, pp=2, cp=1, mbs=1, gbs=128, seq_len=8192, layers=32)
    ),
    "megatron_bridge": Sample(
        "megatron", 1, *FROM_1, 560.5, layout(tp=1, pp=1, cp=1, mbs=1, gbs=32, seq_len=4096, layers=80)
    ),
    "torchtitan": Sample(
        *("torchtitan", 1, (35, 40), (2.33, 2.38), 564.5),
        (("gpu_type", "h100"), *layout(gpus=8, tp=2, pp=1, cp=1, ep=1, mbs=2, gbs=16, seq_len=8192)),
    ),
    "maxtext": Sample("maxtext", 0, *FROM_0, 559.5, (("workload", "llama3.1-8b"), *layout(seq_len=8192))),
    "deepspeed": Sample("deepspeed", 1, *FROM_1, None),
    "huggingface": Sample("huggingface", 1, FROM_1[0], (), None),
    "nanotron": Sample("nanotron", 1, *FROM_1, 560.5),
}


def text_of(name):
    return (FOLDER / f"{name}.log").read_bytes()


def read(text, chunk_bytes=1 << 19, rule="35-44"):
    return read_log(io.BytesIO(text), rule, chunk_bytes)


def steps_of(log):
    attempt = log.attempt
    return log.format, attempt.number, attempt.steps, list(attempt.step), list(attempt.step_time_s), attempt.last


def test_every_format_has_a_sample_and_every_sample_is_expected():
    assert {sample.format for sample in SAMPLES.values()} == {known.name for known in FORMATS}
    assert {path.stem for path in FOLDER.iterdir()} == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_read(name):
    sample = SAMPLES[name]
    log = read(text_of(name))
    attempt = log.attempt
    assert (log.format, attempt.first_number, attempt.number) == (sample.format, sample.first, 1)
    assert (attempt.first_step, attempt.last, attempt.max_step) == (sample.first, sample.first + 49, sample.first + 49)
    assert tuple(attempt.step) == sample.logged
    if sample.times:
        assert list(attempt.step_time_s) == pytest.approx(sample.times, rel=2e-3)
    assert {key: value for key, value in log.configuration.items() if key != ARGUMENTS} == dict(sample.configuration)
    has_arguments = (
        any(key.startswith("layout.") for key, _ in sample.configuration) and "workload" not in log.configuration
    )
    assert (ARGUMENTS in log.configuration) == has_arguments
    found = judge_log(log)
    assert found.status == "success", found.reason
    assert found.step_time_s.mean == pytest.approx(sum(sample.times or FROM_1[1]) / len(sample.logged), rel=3e-3)
    assert (found.tflops_per_gpu and found.tflops_per_gpu.mean) == (sample.tflops and pytest.approx(sample.tflops))
    assert found.loss_last == (None if name == "deepspeed" else 7.0)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_finished_run_is_a_success_whatever_the_window(name):
    for rule in ("all", "reference") if name == "huggingface" else ("last", "all", "reference"):
        found = judge_log(read(text_of(name), rule=rule))
        assert found.status == "success", (rule, found.reason)


TIMES = {
    "llmb": (r"iteration (\d+)/49 .*?timing in s: ([\d.]+)", "{:.3f}"),
    "nemo1": (r"global_step=(\d+)\.00, .*?timing in s=([\d.]+)", "{:.3f}"),
    "nemo2": (r"iteration (\d+)/49 .*?timing in s: ([\d.]+)", "{:.3f}"),
    "megatron_lm": (r"iteration +(\d+)/ .*? \(ms\): ([\d.]+)", "{:.0f}000.0"),
    "megatron_bridge": (r"iteration +(\d+)/ .*? \(ms\): ([\d.]+)", "{:.0f}000.0"),
    "maxtext": (r"completed step: (\d+), seconds: ([\d.]+)", "{:.3f}"),
    "nanotron": (r"iteration: (\d+) / .*?_ms: ([\d.]+K)", "{:.0f}K"),
}
"""Where the samples have the step and its time."""


def slow_until(name, text, last_slow):
    """With steps of 3 s up to ``last_slow``, and of 2 s from then on."""
    pattern, form = TIMES[name]

    def changed(match):
        seconds = 3 if int(match[1]) <= last_slow else 2
        return match[0][: match.start(2) - match.start()] + form.format(seconds)

    return re.sub(pattern, changed, text.decode()).encode()


@pytest.mark.parametrize("name", TIMES)
def test_the_steady_state_of_a_sample_begins_where_its_level_changes(name):
    text, first = slow_until(name, text_of(name), last_slow=12), SAMPLES[name].first
    found = judge_log(read(text, rule="auto"))
    assert (found.window.first, found.window.last, found.window.rule) == (13, first + 49, "auto")
    assert found.step_times_s == pytest.approx((2.0,) * len(found.step_times_s))
    assert judge_log(read(text, rule="reference")).step_times_s == pytest.approx((2.0,) * 10)


@pytest.mark.parametrize("name", ["torchtitan", "huggingface"])
def test_the_steady_state_of_means(name):
    """Of one every fifth step is logged, the other has a clock that shows whole seconds."""

    def clock(bar):
        done = int(bar[1])
        return b"%d/50 [%02d:%02d" % (done, done // 30, done % 30 * 2)

    text = re.sub(rb"tps: [\d,]+", b"tps: 8,192", text_of(name))
    clocked = re.sub(rb"(\d+)/50 \[\d\d:\d\d", clock, text)
    found = judge_log(read(clocked, rule="auto"))
    assert found.status == "success" and found.window.last == 50
    assert found.step_time_s.mean == 2.0
    assert set(found.step_times_s) == ({2.0} if name == "torchtitan" else set())


def wrapped_numbers(text):
    """As programs color the values that they print."""
    return re.sub(rb"(?<=[ :=])(\d+\.\d+)(?=[ ,|\]])", b"\x1b[1;32m\\1\x1b[0m", text)


def prefixed(text, prefix):
    """Before each line, as launchers do, which know nothing of carriage returns."""
    return b"".join(prefix + line for line in text.splitlines(keepends=True) if line) if b"\r" not in text else text


CHANGES = {
    "colors": wrapped_numbers,
    "gzip": gzip.compress,
    "two members of gzip": lambda text: gzip.compress(text[:5000]) + gzip.compress(text[5000:]),
    "UTF-16, little endian": lambda text: b"\xff\xfe" + text.decode().encode("utf-16-le"),
    "UTF-16, big endian": lambda text: b"\xfe\xff" + text.decode().encode("utf-16-be"),
    "UTF-8 with a byte order mark": lambda text: b"\xef\xbb\xbf" + text,
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "srun -l": lambda text: prefixed(text, b"11: "),
    "torchrun": lambda text: prefixed(text, b"[rank3]: "),
    "time stamps": lambda text: prefixed(text, b"2025-06-01T10:00:00.123456Z "),
    "noise between the lines": lambda text: text.replace(b"\n", b"\nNCCL version 2.26.2+cuda12.8\n"),
    "bytes of no encoding": lambda text: text.replace(b"\n", b"\n\xff\xfe\x00\n"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SAMPLES)
def test_what_a_file_goes_through_changes_no_value(name, change):
    assert steps_of(read(CHANGES[change](text_of(name)))) == steps_of(read(text_of(name)))


def test_a_compressed_file_that_is_truncated_is_read_up_to_there(tmp_path):
    path = tmp_path / "log.out"
    path.write_bytes(gzip.compress(text_of("megatron_lm"))[:-700])
    found = parse_file(path, "35-44").outcome
    assert (found.status, found.attempts) == ("incomplete", 1)
    assert 10 < found.max_step < 50


@pytest.mark.parametrize("name", ["nemo2", "megatron_lm", "maxtext", "nanotron", "torchtitan"])
@pytest.mark.parametrize("lag", [1, 3])
def test_ranks_that_log_the_same_steps_are_one_attempt(name, lag):
    lines = re.sub(rb"(?m)^(0: |\[default0\]:|\[rank0\]:)", b"", text_of(name)).splitlines(keepends=True)
    both = []
    for place in range(len(lines) + lag):
        both += [b"0: " + line for line in lines[place : place + 1]]
        both += [b"1: " + line for line in lines[place - lag : place - lag + 1] if place >= lag]
    log = read(b"".join(both))
    assert (log.attempt.number, len(log.attempt.step)) == (1, len(SAMPLES[name].logged))
    assert judge_log(log).status == "success"


@pytest.mark.parametrize("name", SAMPLES)
def test_two_runs_in_one_file_are_two_attempts(name):
    text, sample = text_of(name), SAMPLES[name]
    whole = read(text + text)
    assert (whole.attempt.number, list(whole.attempt.step)) == (2, list(sample.logged))
    died = read(text[: int(0.6 * len(text))].rpartition(b"\n")[0] + b"\nrestarted\n" + text)
    assert (died.attempt.number, list(died.attempt.step)) == (2, list(sample.logged))
    assert judge_log(died).status == "success"


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_that_is_cut_has_no_value_that_the_whole_has_not(name):
    text = text_of(name)
    whole = read(text, rule="all")
    known = set(zip(whole.attempt.step, whole.attempt.step_time_s, strict=True))
    for cut in range(len(text) - 300, len(text), 7):
        attempt = read(text[:cut], rule="all").attempt
        assert set(zip(attempt.step, attempt.step_time_s, strict=True)) <= known, cut
        if name not in ("huggingface", "deepspeed"):  # no line has the total: a run that is cut is a step shorter
            assert attempt.last == whole.attempt.last


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SAMPLES)), st.floats(0, 1), st.integers(1, 1000))
def test_a_file_cut_anywhere_is_read_in_any_chunks(name, where, chunk_bytes):
    text = text_of(name)
    end = int(where * len(text))
    text = text[max(0, end - 4 * chunk_bytes - 1000) : end]
    assert outcome(text, chunk_bytes) == outcome(text)


def outcome(text, *chunk_bytes):
    """What is read, or why it is refused: a cut may leave a bar of another length than the training has."""
    try:
        return repr(asdict(read(text, *chunk_bytes)))
    except UsageError as error:
        return str(error)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([gzip.compress, lambda text: b"\xff\xfe" + text, lambda text: b"\x1f\x8b" + text]), st.binary())
def test_bytes_that_only_look_compressed_or_encoded_are_judged(change, text):
    assert judge_log(read(change(text))).status in ("no_data", "not_training_log")


BEGINNINGS = [
    b"Training epoch 0, iteration 1/49 | ",
    b"iteration 1/ 2 |",
    b"Epoch 0: : 5/50 [00:01, ",
    b"step: 1  loss: 1.0  memory: ",
    b"completed step: 1, seconds: 1.0",
    b"{'loss': 1.0, 'learning_rate': ",
    b" 10%|#| 5/50 [01:02<",
    b"iteration: 1 / 2 | ",
    b"Building device mesh with parallelism: ",
    b"\x1b[0;0;",
    b"GPU utilization: 1",
]


@pytest.mark.parametrize("text", BEGINNINGS)
@pytest.mark.parametrize("end", [b"", b" ", b"\n"])
def test_text_that_only_begins_steps_takes_no_longer_than_its_length(text, end):
    """A quadratic search would take minutes."""
    assert read((text + end) * 20_000).attempt.number == 0


def test_lines_of_another_format_do_not_end_the_reading_of_the_first():
    lines = text_of("megatron_lm").splitlines(keepends=True)
    later = next(line for line in text_of("nemo2").splitlines(keepends=True) if b"Training epoch" in line)
    middle = len(lines) // 2
    mixed = b"".join([*lines[:middle], later, *lines[middle:]])
    assert steps_of(read(mixed)) == steps_of(read(text_of("megatron_lm")))


@pytest.mark.parametrize("place", range(5))
def test_a_field_is_read_wherever_it_is(place):
    fields = [
        "lr: 1e-06",
        "global_step: 3",
        "reduced_train_loss: 2",
        "train_step_timing in s: 4",
        "consumed_samples: 8",
    ]
    fields.insert(place, "TFLOPS_per_GPU: 6.1e+02")
    (step,) = Nemo2Reader().find(f"Training epoch 0, iteration 3/49 | {' | '.join(fields)}\n".encode())
    assert (step.step, step.loss, step.step_time_s, step.tflops_per_gpu) == (3, 2, 4, 610)
