# SPDX-License-Identifier: Apache-2.0
"""What programs print in versions and cases that the sample logs do not have."""

import io
import re
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from llmb.readers.logs.outcome import judge_log
from llmb.readers.logs.reader import read_log

SAMPLES = Path(__file__).parent / "samples"


def read(text, rule="35-44"):
    return read_log(io.BytesIO(text if isinstance(text, bytes) else text.encode()), rule)


def sample(name, *changes):
    """The text of a sample, with every ``before`` replaced that is in it."""
    text = (SAMPLES / f"{name}.log").read_text()
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text


def nemo1(step, total=50, **values):
    """As NeMo 1 prints a step: Lightning pads every value to five characters, also one that is not a number."""
    shown = {"reduced_train_loss": "11.70", "global_step": f"{step}.0", "train_step_timing in s": "2.500", **values}
    fields = ", ".join(f"{key}={value}" for key, value in shown.items())
    return f"Epoch 0: :   2%|2         | {step + 1}/{total} [00:02<01:40, v_num=0, {fields}]\r"


@pytest.mark.parametrize("loss", ["nan.0", "inf.0", "-inf."])
def test_a_padded_loss_that_is_not_a_number_is_one(loss):
    text = "".join(nemo1(step, reduced_train_loss=loss if step >= 20 else "11.70") for step in range(50)) + "\n"
    found = judge_log(read(text))
    assert (found.status, found.reason) == ("invalid", f"loss is {float(loss.rstrip('.0'))} from step 20")


def test_a_padded_gradient_norm_that_is_not_a_number_is_one():
    text = "".join(nemo1(step, grad_norm="nan.0" if step == 30 else "1.250") for step in range(50)) + "\n"
    assert judge_log(read(text)).reason == "the gradient norm is not finite from step 30"


def test_a_global_step_in_three_digits_is_taken_from_the_bar():
    """Lightning prints 1000.0 to 1004.0 as 1e+3, which does not tell the step."""
    steps = range(1100)
    text = "".join(nemo1(step, 1100, global_step="1e+3" if 1000 <= step < 1005 else f"{step}.0") for step in steps)
    attempt = read(text + "\n", "all").attempt
    assert list(attempt.step) == list(steps)


def test_a_run_of_torchtitan_in_fp8_has_no_mfu():
    text = re.sub(r"mfu: [\d.]+%", "mfu: N/A", sample("torchtitan"))
    assert "mfu: N/A" in text
    assert read(text).attempt.step_time_s == read(sample("torchtitan")).attempt.step_time_s


def test_the_header_of_torchtitan_that_counts_tokens():
    before = "local batch size 2, global batch size 16, gradient accumulation steps 2, sequence length 8192,"
    after = "32768 tokens per DP rank, 131072 tokens per train step, gradient accumulation steps 1,"
    after += " maximum context length 8192,"
    new, old = read(sample("torchtitan", (before, after))), read(sample("torchtitan"))
    assert (new.attempt.step_time_s, new.attempt.last) == (old.attempt.step_time_s, old.attempt.last)
    sizes = {name: new.configuration.get(f"layout.{name}") for name in ("mbs", "gbs", "seq_len")}
    assert sizes == {"mbs": 4, "gbs": 16, "seq_len": 8192}


def titan(tps, *, header="", validated_s=0.0):
    """100 steps of 2 s, of which every tenth is logged, with a validation behind it."""
    mesh = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1"
    begun, lines, passed_s = datetime(2026, 2, 24, 19, 46), [], 0.0
    for before, step in pairwise((0, 1, *range(10, 101, 10))):
        passed_s += 2.0 * (step - before)
        stamp = f"[titan] {begun + timedelta(seconds=passed_s)},000 - root - INFO - "
        lines.append(f"{stamp}step: {step:2d}  loss:  7.99  memory: 66.91GiB(37.51%)  tps: {tps:,}  mfu: 33.74%")
        passed_s += validated_s
        lines += [f"{stamp}validate step: {step:2d}  loss:  7.9  memory: 66GiB(37.51%)  tps: 9"] if validated_s else []
    return "\n".join([mesh, f"Trainer is initialized with {header}, total steps 100 (warmup 2)", *lines, ""])


TITAN_TOKENS = "16384 tokens per DP rank, 262144 tokens per train step, {}maximum context length 8192"
TITAN_BATCH = "local batch size 2, global batch size 32, {}sequence length 8192"
PASSES = "gradient accumulation steps 2, "


@pytest.mark.parametrize("header", [TITAN_TOKENS, TITAN_BATCH])
def test_the_tokens_of_a_step_of_torchtitan_are_those_of_all_replica_groups(header):
    """Two of 8 GPUs: 32,768 tokens of each data-parallel rank take 2 s on its two GPUs."""
    found = judge_log(read(titan(8192, header=header.format(PASSES)), "all"))
    assert (found.status, found.step_time_s.mean, found.gpus) == ("success", 2.0, 16), found.reason


@pytest.mark.parametrize("tps", [2048, 16384 * 2])
def test_a_rate_of_torchtitan_that_contradicts_its_time_stamps_is_invalid(tps):
    found = judge_log(read(titan(tps, header=TITAN_TOKENS.format(PASSES)), "all"))
    assert (found.status, "by the clock" in found.reason) == ("invalid", True)


def test_a_header_of_torchtitan_that_does_not_tell_the_replica_groups_is_found_by_the_time_stamps():
    found = judge_log(read(titan(8192, header=TITAN_BATCH.format("")), "all"))
    assert (found.status, found.reason.partition(":")[0]) == (
        "invalid",
        "step times of the window sum to 396 s, but 198 s passed by the clock",
    )


def test_validations_of_torchtitan_are_in_no_step_time():
    found = judge_log(read(titan(8192, header=TITAN_TOKENS.format(PASSES), validated_s=60.0), "all"))
    assert (found.status, found.step_time_s.mean) == ("success", 2.0), found.reason


@pytest.mark.parametrize("loss", ["infE", "inf", "nan", "-infE"])
def test_a_loss_of_nanotron_that_is_not_finite(loss):
    found = judge_log(read(re.sub(r"lm_loss: [^ ]+", f"lm_loss: {loss}", sample("nanotron"))))
    assert (found.status, found.reason) == ("invalid", f"loss is {loss.rstrip('E')} from step 1")


@pytest.mark.parametrize(("suffix", "power"), [("K", 1), ("M", 2), ("G", 3), ("B", 3), ("T", 4), ("P", 5), ("E", 6)])
def test_the_suffixes_of_nanotron_in_all_versions(suffix, power):
    text = re.sub(r"model_tflops_per_gpu: [^ ]+", f"model_tflops_per_gpu: 1.5{suffix}", sample("nanotron"))
    found = judge_log(read(text)).tflops_per_gpu
    assert found and found.mean == 1.5 * 1000**power


def test_maxtext_counts_slices_between_the_time_and_the_throughput():
    text = sample("maxtext", (", TFLOP/s/device: ", ", live slice count: 4, TFLOP/s/device: "))
    new, old = (judge_log(read(one)) for one in (text, sample("maxtext")))
    assert new.tflops_per_gpu and new.tflops_per_gpu == old.tflops_per_gpu


def test_maxtext_in_a_rampup_of_the_batch_has_no_throughput():
    line = (
        "[Rampup Batch Size Phase], completed step: {}, seconds: 2.5, total_weights: 65536, loss: 10.8, lm_loss: 10.7\n"
    )
    attempt = read("".join(line.format(step) for step in range(50))).attempt
    assert (len(attempt.step), attempt.loss_last) == (10, 10.8)


def test_a_step_that_was_skipped_because_of_nan_is_skipped_once():
    """Megatron counts a loss that is not finite only among the skipped iterations."""
    text = "".join(
        f" iteration {step:8d}/      50 | elapsed time per iteration (ms): 2000.0 | loss scale: 1.0 |"
        f" number of skipped iterations: {step == 40:3d} | number of nan iterations: {step == 40:3d} |\n"
        for step in range(1, 51)
    )
    assert judge_log(read(text)).reason == "1 step of the window skipped the update of the parameters"


def test_a_mean_loss_of_hugging_face_in_full_precision():
    text = "{'train_runtime': 125.0, 'train_steps_per_second': 0.4, 'train_loss': 2.3456789012345679, 'epoch': 1.0}\n"
    found = judge_log(read(text, "last"))
    assert (found.status, found.loss_last) == ("success", 2.3456789012345679)


@pytest.mark.parametrize(
    ("runtime", "rate", "status"), [(25_000, 0.004, "no_data"), (900, 0.004, "success"), (25_000, 0.4, "success")]
)
def test_a_rate_that_is_too_coarse_for_the_number_of_steps_is_not_taken(runtime, rate, status):
    """0.004 steps/s are 0.0035 to 0.0045: between 87 and 112 steps in 25,000 s."""
    text = f"{{'train_runtime': {runtime}, 'train_samples_per_second': 1.0, 'train_steps_per_second': {rate}}}\n"
    assert judge_log(read(f"training\n{text}", "last")).status == status
    steps = round(runtime * rate)
    known = judge_log(read(f"  Total optimization steps = {steps}\n{text}", "last"))
    assert known.step_time_s and known.step_time_s.mean == runtime / steps


def test_a_bar_that_leaps_to_where_the_run_resumes_is_of_one_step():
    """The bar begins at 0 whatever was done before: step 26 took 12 s, not 12/26 s."""
    bars = "\r  0%|  | 0/50 [00:00<?, ?it/s]"
    bars += "".join(
        f"\r{2 * step}%|##   | {step}/50 [{(step - 25) // 5:02d}:{(step - 25) % 5 * 12:02d}<00:10]"
        for step in range(26, 51)
    )
    log = read(bars + "\n{'train_runtime': 300.2, 'train_steps_per_second': 0.5, 'train_loss': 2.5}\n", "26-50")
    found = judge_log(log)
    assert (found.status, found.step_time_s and found.step_time_s.mean) == ("success", 12.0), found.reason
    assert (found.step_time_s.count, found.clock_error_s) == (25, 1 / 25)


def test_a_run_of_hugging_face_that_ends_before_the_first_loss_is_logged():
    """With ``logging_steps`` 500, as it is by default."""
    bars = "".join(
        f"\r{2 * step:3d}%|##   | {step}/50 [{step // 30:02d}:{2 * step % 60:02d}<00:10]" for step in range(51)
    )
    found = judge_log(read(bars + "\n{'train_runtime': 100.2, 'train_steps_per_second': 0.5, 'train_loss': 2.5}\n"))
    assert (found.status, found.step_time_s and found.step_time_s.mean) == ("success", 2.0), found.reason


def test_the_forms_of_megatron_deepspeed_and_primus():
    """Seconds in hundredths, TFLOPS under another name, and means beside the values."""
    seconds = " iteration {:8d}/      50 | elapsed time per iteration (s): 2.00 | lm loss: 1.0E+01 | TFLOPs: 100.2 |\n"
    primus = (
        " iteration {:8d}/      50 | consumed samples:  1 | elapsed time per iteration (ms): 2000.0/2100.5 |"
        " throughput per GPU (TFLOP/s/GPU): 100.2/99.1  | tokens per GPU (tokens/s/GPU): 9.5/9.1 | lm loss: 1.0E+01 |\n"
    )
    for line in (seconds, primus):
        found = judge_log(read("".join(map(line.format, range(1, 51)))))
        assert (found.status, found.step_time_s and found.step_time_s.mean, found.loss_last) == ("success", 2.0, 10.0)
        assert found.tflops_per_gpu.mean == pytest.approx(100.2)
    fast = judge_log(read("".join(map(seconds.replace("2.00", "0.01").format, range(1, 51)))))
    assert (fast.status, fast.step_time_s) == ("no_data", None)


@pytest.mark.parametrize("seconds", ["0.004", "0.000", "-1.000"])
def test_times_that_are_printed_too_coarsely_are_not_read(seconds):
    """0.004 s are 3.5 to 4.5 ms."""
    found = judge_log(read(re.sub(r"seconds: [\d.]+", f"seconds: {seconds}", sample("maxtext"))))
    assert (found.status, found.step_time_s) == ("no_data", None)
    assert "but none with a step and its time" in found.reason


RATE = (
    "[2024-05-01 10:00:00,000] [INFO] [timer.py:260:stop] epoch=0/micro_step={0}/global_step={0},"
    " RunningAvgSamplesPerSec=15.1, CurrSamplesPerSec=16.0, MemAllocated=4.75GB, MaxMemAllocated=15.59GB\n"
)


def test_the_rates_of_deepspeed_without_timers():
    text = "  train_batch_size ............. 32\n" + "".join(map(RATE.format, range(10, 101, 10)))
    found = judge_log(read(text))
    assert (found.format, found.status, found.step_time_s and found.step_time_s.mean) == ("deepspeed", "success", 2.0)
    assert found.reason.endswith("of which one in 10 is logged")
    assert judge_log(read("".join(map(RATE.format, range(10, 101, 10))))).status == "no_data"  # of which batch?


def test_the_lines_of_a_pipeline_of_deepspeed():
    line = "steps: {} loss: 7.1234 iter time (s): 1.250 samples/sec: 25.600\n"
    found = judge_log(read("".join(map(line.format, range(10, 101, 10))), "all"))
    assert (found.status, found.step_time_s.mean, found.step_time_s.count) == ("success", 1.25, 100)


def test_lines_of_megatron_count_before_those_of_deepspeed():
    head = "------------------------ arguments ------------------------\n  train_batch_size ............. 32\n"
    text = "".join(RATE.format(step) + line for step, line in enumerate(_iterations(), 1))
    assert judge_log(read(head + text)).format == "megatron"
    assert judge_log(read(text)).format == "deepspeed"


def _iterations():
    return (
        f" iteration {step}/ 50 | elapsed time per iteration (ms): 2000.0 | lm loss: 1.0 |\n" for step in range(1, 51)
    )


TIME_LIMIT = "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2025-01-01T00:00:00 DUE TO TIME LIMIT ***"
KILLED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 123 got signal: 15"
OUT_OF_MEMORY = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed."
)
WATCHDOG = "Process group watchdog thread terminated with exception: NCCL error: unhandled system error"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([TIME_LIMIT, "srun: error: n1: task 0: Terminated"], TIME_LIMIT),
        ([f"0: {TIME_LIMIT}", f"1: {KILLED}"], TIME_LIMIT),
        (["ValueError: x", TIME_LIMIT, KILLED], "ValueError: x"),
        ([TIME_LIMIT.replace(" DUE TO TIME LIMIT", ""), "ValueError: x"], "ValueError: x"),
        ([OUT_OF_MEMORY, "srun: error: n1: task 3: Out Of Memory"], OUT_OF_MEMORY),
        (
            ["terminate called", f"  what():  {WATCHDOG}", "Fatal Python error: Aborted", "  <no Python frame>"],
            WATCHDOG,
        ),
        (
            ["Fatal Python error: Segmentation fault", "", "Current thread (most recent call first):", '  File "a.py"'],
            "Fatal Python error: Segmentation fault",
        ),
    ],
)
def test_the_cause_of_a_death_is_quoted_and_not_what_follows_from_it(lines, cause):
    died = "".join(sample("megatron_lm").splitlines(keepends=True)[:40])
    found = judge_log(read(died + "\n".join([*lines, ""])))
    assert found.reason.partition("; ")[2] == cause[:160]


@pytest.mark.parametrize("prefix", ["ain_fp8_mx/0 ", "ain_fp8_mx/0 [rank0]: ", "[default3]:[rank3]: ", "3: [rank3]: "])
def test_an_error_is_quoted_whatever_is_before_it(prefix):
    died = "".join(sample("megatron_lm").splitlines(keepends=True)[:40])
    found = judge_log(read(f"{died}{prefix}torch.OutOfMemoryError: CUDA out of memory\nsrun: error: node7\n"))
    assert found.reason.endswith("; torch.OutOfMemoryError: CUDA out of memory")
