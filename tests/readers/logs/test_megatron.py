# SPDX-License-Identifier: Apache-2.0
"""Logs of Megatron-LM and Megatron-Bridge."""

import io
import math

import pytest

from llmb.readers.logs.outcome import judge_log
from llmb.readers.logs.reader import CHUNK_BYTES, read_log

# As Megatron-Bridge v0.4 prints them: two lines an iteration, by the first and by the last rank.
BRIDGE = """\
Step Time : {s:.2f}s GPU utilization: {tflops:.1f}MODEL_TFLOP/s/GPU
 [2025-12-19 10:49:15] iteration {n:8d}/{last:8d} | consumed samples: {samples:12d} | elapsed time per iteration (ms): \
{ms:.1f} | learning rate: 4.500000E-08 | global batch size:    32 | lm loss: {loss} | loss scale: 1.0 | grad norm: \
{norm} | number of skipped iterations:   0 | number of nan iterations:   0 |
"""
# As Megatron-LM prints it, with the throughput in the line.
MEGATRON_LM = " | ".join(
    [
        " [2024-05-01 10:00:00.123456] iteration {n:8d}/{last:8d}",
        "consumed samples: {samples:12d}",
        "elapsed time per iteration (ms): {ms:.1f}",
        "throughput per GPU (TFLOP/s/GPU): {tflops:.1f}",
        "learning rate: 4.5E-08",
        "global batch size:    32",
        "lm loss: {loss}",
        "loss scale: 1.0",
        "grad norm: {norm}",
        "number of skipped iterations:   0",
        "number of nan iterations:   0 |\n",
    ]
)


def iteration(n, last=50, *, form=BRIDGE, s=2.0, tflops=650.5, loss="1.170000E+01", norm="10.275"):
    text = form.format(n=n, last=last, s=s, ms=1000 * s, tflops=tflops, loss=loss, norm=norm, samples=32 * n)
    return text.encode()


def read(text, chunk_bytes=CHUNK_BYTES, rule="all"):
    return read_log(io.BytesIO(text), rule, chunk_bytes)


def judged(text, rule="reference"):
    return judge_log(read(text, rule=rule))


@pytest.mark.parametrize("form", [BRIDGE, MEGATRON_LM])
def test_iterations_are_steps(form):
    text = b"".join(iteration(n, form=form, s=2 + n / 100, tflops=600 + n) for n in range(1, 51))
    found = judged(b"setting up\n" + text)
    assert (found.status, found.steps, found.max_step) == ("success", 50, 50)
    assert (found.window.first, found.window.last) == (35, 44)
    assert found.step_time_s.mean == pytest.approx(2 + 39.5 / 100)
    assert found.tflops_per_gpu.mean == pytest.approx(639.5)
    assert (found.loss_first, found.loss_last) == (11.7, 11.7)


def test_a_prefix_of_the_launcher_does_not_matter():
    lines = b"".join(iteration(n, 3) for n in range(1, 4)).splitlines(keepends=True)
    assert judged(b"".join(b"ain_fp8_mx/0 " + line for line in lines), "all").status == "success"


def test_a_run_that_died_says_where():
    found = judged(b"".join(iteration(n) for n in range(1, 21)) + b"torch.OutOfMemoryError: CUDA out of memory\n")
    assert found.status == "incomplete"
    assert found.reason.startswith("died after step 20 of 50; torch.OutOfMemoryError")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"norm": "nan"}, "the gradient norm is not finite from step 21"), ({"loss": "NAN"}, "loss is nan from step 21")],
)
def test_numbers_that_are_none_make_a_run_invalid(fields, reason):
    text = b"".join(iteration(n, **(fields if n == 21 else {})) for n in range(1, 51))
    found = judged(text)
    assert (found.status, found.reason) == ("invalid", reason)


def test_throughput_that_is_not_logged_is_unknown():
    lines = (iteration(n, 2).splitlines(keepends=True)[1] for n in (1, 2))
    found = judged(b"".join(lines), "all")
    assert (found.status, found.tflops_per_gpu) == ("success", None)


def test_a_run_that_goes_on_begins_where_its_checkpoint_ends():
    loaded = b" successfully loaded checkpoint from /ckpt [ t 1/8, p 1/4 ] at iteration 50\n"
    found = judged(loaded + b"".join(iteration(n, 60) for n in range(51, 61)), "all")
    assert (found.status, found.window.first, found.window.last) == ("success", 51, 60)
    assert judged(b"".join(iteration(n, 60) for n in range(51, 61)), "all").status == "incomplete"


def test_a_last_line_without_its_end():
    text = b"".join(iteration(n, 3) for n in range(1, 4))
    assert judged(text.rstrip(b"\n"), "all").status == "success"
    cut = judged(text[:-60], "all")
    assert cut.status == "incomplete"
    assert cut.reason.startswith("died after step 2 of 3, while logging the next")


def test_text_without_ends_takes_no_longer_than_its_length():
    """A quadratic search would take minutes."""
    text = b"iteration 1/ 2 |" * 100_000
    assert math.isnan(read(text).attempt.loss_last)
