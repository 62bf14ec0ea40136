# SPDX-License-Identifier: Apache-2.0
"""What a log is taken for, in status and in words."""

import io
import math
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from step_lines import step_line

from llmb.readers.anomalies import NO_STEADY_STATE
from llmb.readers.logs.outcome import judge_log
from llmb.readers.logs.reader import CHUNK_BYTES, read_log
from llmb.readers.logs.step_line import LoadLine, format_load_line

SAMPLES = Path(__file__).parent / "samples"


def line(step, steps=50, *, time=2.5, loss=12.5, tflops=600.0):
    return step_line(step, steps, loss=loss, step_time_s=time, tflops_per_gpu=tflops).rstrip("\n")


def judge(text, rule="reference"):
    return judge_log(read_log(io.BytesIO(text if isinstance(text, bytes) else text.encode()), rule))


def run(numbers, steps=50, rule="reference", end="", **values):
    return judge("".join(line(number, steps, **values) + "\n" for number in numbers) + end, rule)


def test_a_whole_run():
    found = judge("\n".join(line(n, time=1 + n / 100, loss=12 - n / 10, tflops=500 + n) for n in range(50)))
    assert (found.status, found.reason) == ("success", "steps 35-44 of 50")
    assert (found.steps, found.attempts, found.max_step) == (50, 1, 49)
    assert found.step_time_s.count == 10
    assert found.step_time_s.mean == pytest.approx(1.395)
    assert found.tflops_per_gpu.mean == pytest.approx(539.5)
    assert (found.loss_first, found.loss_last) == (12.0, 7.1)


@pytest.mark.parametrize(
    ("steps", "first", "last"), [(2, 1, 1), (3, 2, 2), (20, 14, 17), (100, 70, 89), (1000, 700, 899)]
)
def test_any_number_of_steps(steps, first, last):
    found = run(range(steps), steps)
    assert found.status == "success"
    assert (found.window.first, found.window.last) == (first, last)
    assert found.step_time_s.count == last - first + 1


def test_a_run_of_one_step_is_no_result():
    found = run(range(1), 1)
    assert (found.status, found.reason) == ("too_few_steps", "the only step is the first one, which includes warm-up")
    assert (found.step_time_s, found.step_times_s, found.steps) == (None, (), 1)


def test_the_step_times_of_the_window_are_kept_in_order():
    found = judge("\n".join(line(n, time=1 + n / 100) for n in range(50)))
    assert found.step_times_s == pytest.approx([1 + n / 100 for n in range(35, 45)])


def test_no_tflops_is_unknown_not_a_failure():
    found = run(range(50), tflops=None)
    assert found.status == "success"
    assert found.tflops_per_gpu is None


def test_tflops_that_only_some_steps_have_are_unknown():
    found = judge("\n".join(line(n, tflops=None if n == 40 else 600.0) for n in range(50)))
    assert (found.status, found.tflops_per_gpu) == ("success", None)


@pytest.mark.parametrize("reached", [0, 20, 40, 47, 48])
def test_a_run_that_died(reached):
    found = run(range(reached + 1))
    assert (found.status, found.reason) == ("incomplete", f"died after step {reached} of 50")
    assert (found.steps, found.max_step) == (reached + 1, reached)
    assert found.step_time_s is None


def test_the_reason_quotes_the_exception():
    end = (
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]:   File 'x.py', line 1\n"
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory.\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        "srun: error: node1: task 0: Exited with exit code 1\n"
    )
    found = run(range(21), end=end)
    assert found.reason == "died after step 20 of 50; torch.OutOfMemoryError: CUDA out of memory."


@pytest.mark.parametrize(
    "prefix", ["3: ", "[rank3]: ", "[default3]:[rank3]: ", "2025-06-01T10:00:00.123456Z ", "11: [rank11]: "]
)
def test_a_prefix_hides_no_exception(prefix):
    end = f"{prefix}RuntimeError: CUDA error: an illegal memory access\n{prefix}srun: error: node1: task 3: Exited\n"
    assert (
        run(range(21), end=end).reason == "died after step 20 of 50; RuntimeError: CUDA error: an illegal memory access"
    )


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]:[E1122 10:00:00.123 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout:"
        " WorkNCCL(SeqNum=71, OpType=ALLREDUCE)",
        "node1:123:456 [3] NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
    ],
)
def test_the_reason_quotes_a_failure_of_nccl(line):
    end = f"{line}\n[rank3]:[E1122 10:00:01.123 ProcessGroupNCCL.cpp:630] To avoid data inconsistency, stopping\n"
    assert run(range(21), end=end).reason.endswith(
        line[line.index("Watchdog" if "Watchdog" in line else "NCCL WARN") :]
    )


def test_the_reason_quotes_the_last_line_without_control_characters():
    end = "\x1b[31mslurmstepd: *** JOB 7 CANCELLED\x07 DUE TO TIME LIMIT ***\x1b[0m\n\n \r\n"
    assert run(range(21), end=end).reason.endswith("; slurmstepd: *** JOB 7 CANCELLED  DUE TO TIME LIMIT ***")


def test_an_exception_before_the_last_step_is_no_reason():
    assert judge("ImportError: apex\n" + line(0) + "\n").reason == "died after step 0 of 50"


def test_a_run_that_died_in_a_line():
    assert run(range(21), end=line(21)[:90]).reason == "died after step 20 of 50, while logging the next"


def test_missing_steps():
    kept = [n for n in range(50) if n not in (36, 37, 40, 41, 42, 44)]
    assert (run(kept).status, run(kept).reason) == ("incomplete", "steps 36, 37, 40-42, 44 missing")
    assert run([n for n in range(50) if n != 36]).reason == "step 36 missing"


def test_steps_missing_outside_the_window_do_not_matter():
    assert run([0, *range(30, 50)]).status == "success"


def test_a_second_attempt_is_what_counts():
    first = "".join(line(n, time=9.0) + "\n" for n in range(30))
    whole = judge(first + "\n".join(line(n) for n in range(50)))
    assert (whole.status, whole.reason) == ("success", "steps 35-44 of 50 (attempt 2)")
    assert (whole.attempts, whole.step_time_s.mean) == (2, 2.5)
    died = judge(first + "\n".join(line(n) for n in range(3)))
    assert (died.status, died.reason) == ("incomplete", "died after step 2 of 50 (attempt 2)")
    resumed = judge("".join(line(n) + "\n" for n in range(45)) + "\n".join(line(n) for n in range(40, 50)))
    assert (resumed.status, resumed.reason) == ("incomplete", "steps 35-39 missing (attempt 2)")


def test_a_loss_that_is_not_finite_makes_a_run_invalid_wherever_it_is():
    found = judge("\n".join(line(n, loss=math.nan if n >= 12 else 1.0) for n in range(50)))
    assert (found.status, found.reason) == ("invalid", "loss is nan from step 12")
    assert (found.step_time_s, found.tflops_per_gpu) == (None, None)
    assert (found.loss_first, found.loss_last) == (1.0, None)
    short = judge("\n".join(line(n, loss=math.nan if n == 3 else 1.0) for n in range(21)))
    assert (short.status, short.reason) == ("invalid", "loss is nan from step 3; died after step 20 of 50")
    infinite = judge(
        "\n".join(line(n) for n in range(50)).replace("reduced_train_loss: 12.5", "reduced_train_loss: inf")
    )
    assert infinite.reason == "loss is inf from step 0"


def test_a_step_time_that_is_not_finite_makes_a_run_invalid():
    text = "\n".join(line(n) for n in range(50))
    found = judge(text.replace(": 2.500", ": inf"))
    assert (found.status, found.reason) == ("invalid", "a step time in steps 35-44 is not finite")


def test_windows_by_rule():
    assert run(range(50), rule="11-44").step_time_s.count == 34
    assert run(range(50), rule="all").step_time_s.count == 50
    last = run(range(50), rule="last")
    assert (last.step_time_s.count, last.step_time_s.std, last.reason) == (1, None, "step 49 of 50")


def test_a_window_outside_the_run():
    found = run(range(20), 20, rule="35-44")
    assert found.status == "too_few_steps"
    assert found.reason == "window 35-44 is outside the run, whose 20 steps are numbered 0-19"
    assert (found.window, found.steps) == (None, 20)
    died = run(range(12), 20, rule="35-44")
    assert (died.status, died.reason) == ("incomplete", "died after step 11 of 20")
    assert run(range(20), 20, rule="35-44", loss=math.nan).status == "invalid"


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (b"", "no_data", "empty file"),
        (line(0)[:90].encode(), "no_data", "the file ends within its first step line"),
        (b"\x7fELF\x00\x01", "not_training_log", "no step line: binary data, or text in another encoding; \ufffdELF"),
        (line(0).encode("utf-16-le"), "not_training_log", "no step line: binary data, or text in another encoding"),
        (b"Epoch 0: 50/50 [train_step_timing in s=12.80]", "no_data", "no step line: lines like those of NeMo 1, but"),
        (
            b" iteration 1/ 1 | elapsed time per iteration (ms): 20289.1 |",
            "no_data",
            "the file ends within its first step line",
        ),
        (
            b"loading model\nRuntimeError: NCCL\n",
            "no_data",
            "no step line: a run that ended before its first step, or a program whose steps llmb cannot read;"
            " RuntimeError: NCCL",
        ),
        (b"hello\n\n", "not_training_log", "no step line: not a training log; hello"),
        (b"\n \n", "not_training_log", "no step line: not a training log"),
    ],
)
def test_logs_without_steps(text, status, reason):
    found = judge(text)
    assert found.status == status
    assert found.reason.replace("\ufffd", "").startswith(reason.replace("\ufffd", ""))
    assert (found.steps, found.window, found.step_time_s, found.max_step) == (0, None, None, None)


@given(st.lists(st.integers(0, 60), max_size=80), st.sampled_from(["reference", "auto", "last", "all", "3-7"]))
@example([41, 48], "reference")
def test_a_success_always_has_every_step_of_its_window(numbers, rule):
    found = run(numbers, 50, rule)
    if found.status == "success":
        steps = found.window.last - found.window.first + 1
        means = re.search(r"means of (\d+) steps", found.reason)
        assert found.step_time_s.count == steps or (means and found.step_time_s.count < steps)
        assert found.max_step > 49 - (int(means[1]) if means else 1)
    else:
        assert found.reason
        assert found.step_time_s is None


LOADED = format_load_line(LoadLine(0, 1744407969.27, 9.712))


def test_a_run_that_went_on_from_a_checkpoint_has_its_window_after_it():
    continued = "".join(line(number, 100) + "\n" for number in range(50, 100))
    found = judge(f"{LOADED}\n{continued}")
    assert (found.status, found.reason) == ("success", "steps 85-94 of 100")
    assert judge(f"{LOADED}\n{line(50, 52)}\n{line(51, 52)}").reason == "step 51 of 52"
    assert judge(continued).reason == "steps 70-89 of 100"


def test_a_run_resumed_for_one_step_is_no_result():
    found = judge(f"{LOADED}\n{line(50, 51)}")
    assert (found.status, found.step_time_s) == ("resumed", None)
    assert found.reason == "resumed for one step, which includes warm-up; it shows that the checkpoint loads"
    assert judge(f"{LOADED}\n{line(50, 51)}", "last").status == "resumed"


NSYS = "Capture range started in the application.\n"
NCCL = "node1:7:9 [0] NCCL INFO AllReduce: opCount 1f sendbuff 0x7f count 4 datatype 9\n"


@pytest.mark.parametrize(
    ("text", "status"),
    [(NSYS, "profiled"), ("Generating '/tmp/nsys-report-beb1.qdstrm'\n", "profiled"), (NCCL, "traced")],
)
def test_a_run_that_was_slowed_down_is_kept_apart_with_its_figures(text, status):
    found = run(range(50), end=text)
    assert (found.status, found.step_time_s.count) == (status, 10)
    assert found.reason.endswith("which slows a run down")
    assert run(range(21), end=text).status == "incomplete"


def test_lines_of_nccl_that_are_not_of_collectives_change_nothing():
    assert run(range(50), end="node1:7:9 [0] NCCL INFO Bootstrap: Using eth0\n").status == "success"


def test_a_load_after_the_first_step_changes_nothing():
    later = f"{LOADED}\n".join(line(number) + "\n" for number in range(50))
    assert judge(later).reason == "steps 35-44 of 50"
    again = "".join(line(number) + "\n" for number in range(20, 50))
    assert judge(f"{line(0)}\n{line(30)}\n{LOADED}\n{again}").reason == "steps 35-44 of 50 (attempt 2)"


@pytest.mark.parametrize("before", [0, CHUNK_BYTES - 10, CHUNK_BYTES])
def test_a_load_is_seen_wherever_the_file_is_cut_for_reading(before):
    noise = "x" * 99 + "\n"
    head = (noise * (before // 100 + 1))[: before - 1] + "\n" if before else ""
    assert judge(f"{head}{LOADED}\n{line(50, 51)}").status == "resumed"


def warming_up(count, first=0, declared=None):
    """Five slow steps, then steps that take 1.97 to 2.03 s, and a checkpoint every tenth."""
    times = [4.0 if n < 5 else 3.0 if n % 10 == 9 else 1.97 + 0.01 * (n * 5 % 7) for n in range(count)]
    return [line(first + n, declared or first + count, time=time, tflops=500 + n) for n, time in enumerate(times)]


def test_the_steady_state_of_a_log():
    found = judge("\n".join(warming_up(100)), "auto")
    assert (found.status, found.reason) == ("success", "steps 5-98 of 100")
    assert (found.window.first, found.window.last, found.window.rule) == (5, 98, "auto")
    assert (found.step_time_s.count, len(found.step_times_s)) == (94, 94)
    assert found.tflops_per_gpu.min == 505


def test_the_steady_state_of_a_run_that_resumed():
    found = judge(f"{LOADED}\n" + "\n".join(warming_up(60, 200)), "auto")
    assert (found.status, found.window.first, found.window.last) == ("success", 205, 258)


def test_the_steady_state_is_that_of_the_last_attempt():
    found = judge("\n".join([*warming_up(40, declared=60), *warming_up(60)]), "auto")
    assert (found.status, found.reason) == ("success", "steps 5-58 of 60 (attempt 2)")


def test_a_missing_step_in_the_steady_state_is_missing():
    lines = warming_up(60)
    del lines[30]
    found = judge("\n".join(lines), "auto")
    assert (found.status, found.reason) == ("incomplete", "step 30 missing")


@pytest.mark.parametrize("lines", [warming_up(10), [line(n, time=1.2 ** (n // 8)) for n in range(50)]])
def test_a_log_without_a_steady_state_is_no_result(lines):
    found = judge("\n".join(lines), "auto")
    assert (found.status, found.window, found.step_time_s) == ("too_few_steps", None, None)
    assert found.reason == NO_STEADY_STATE


def test_a_time_that_is_not_finite_is_invalid_also_without_a_window():
    found = judge("\n".join([*warming_up(59, declared=60), line(59, 60, time=float("nan"))]), "auto")
    assert (found.status, found.step_time_s) == ("invalid", None)


@pytest.mark.parametrize("sample", sorted(path.name for path in SAMPLES.glob("*.log")))
@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-01T12:00:00 DUE TO TIME LIMIT ***",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        "/bin/bash: line 1: 4711 Killed  python train.py",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "Traceback (most recent call last):",
    ],
)
def test_an_error_after_the_last_step_is_a_note(sample, error):
    """Of every format; also where a run ends without an error that was printed last."""
    text = (SAMPLES / sample).read_bytes().rstrip(b"\n") + b"\n"
    whole, ended = judge(text), judge(text + error.encode() + b"\nbye\n")
    assert ended.status == whole.status and ended.step_time_s == whole.step_time_s
    if whole.status == "success":
        assert ended.reason.endswith(f"; after its last step: {error}")
        assert "after its last step" not in whole.reason
        at_end = None if "TIME LIMIT" in error else error
        assert (whole.error_at_end, ended.error_at_end) == (None, at_end)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***\nSystemExit: Error", None),
        ("RuntimeError: a\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***", "RuntimeError: a"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT x DUE TO NODE FAILURE ***", "slurmstepd: error: "),
    ],
)
def test_what_the_time_limit_led_to_is_no_error_and_what_came_before_is(end, error):
    found = run(range(50), end=end + "\n").error_at_end
    assert found is None if error is None else found.startswith(error)


@pytest.mark.parametrize(
    ("ms", "status", "reason"),
    [
        (20000, "success", "steps 35-44 of 50"),
        (60000, "invalid", "step times of the window sum to 600 s, but 200 s passed by the clock"),
        (2000, "invalid", "a step of the window takes 2 s, but 20 s by the clock"),
    ],
)
def test_step_times_have_to_agree_with_the_clock_of_their_lines(ms, status, reason):
    found = judge(
        "".join(
            f" [2025-06-01 10:{n // 3:02}:{n % 3 * 20:02}] iteration {n}/ 50 |"
            f" elapsed time per iteration (ms): {ms}.0 | lm loss: 1.1E+01 |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
            for n in range(1, 51)
        )
    )
    assert (found.status, found.reason) == (status, reason)
