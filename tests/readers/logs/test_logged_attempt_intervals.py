# SPDX-License-Identifier: Apache-2.0
"""Logs of every n-th step, of several epochs, and of lines that others cut or came between."""

import io

import pytest

from llmb.readers.logs.configuration import configuration_of, experiment_configuration
from llmb.readers.logs.outcome import judge_log
from llmb.readers.logs.reader import read_log


def judged(lines, rule="35-44"):
    return judge_log(read_log(io.BytesIO("\n".join([*lines, ""]).encode()), rule))


def nemo(step, *, iteration=None, epoch=0, last=49, seconds=None, end=" | consumed_samples: 128"):
    number, timing = step if iteration is None else iteration, seconds or 2 + step / 100
    return (
        f"Training epoch {epoch}, iteration {number}/{last} | global_step: {step} | reduced_train_loss: 11.5"
        f" | train_step_timing in s: {timing} | TFLOPS_per_GPU: 612.0{end}"
    )


def megatron(number, last=50, skipped=0):
    return (
        f" iteration {number:8d}/{last:8d} | elapsed time per iteration (ms): {2000 + 10 * number}.0 |"
        f" lm loss: 1.15E+01 | number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
    )


def test_a_log_of_every_tenth_step_is_of_a_finished_run():
    found = judged(megatron(number) for number in range(10, 51, 10))
    assert (found.status, found.reason) == ("success", "steps 31-40 of 50, by means of 10 steps")
    assert (found.step_time_s.count, found.step_time_s.mean) == (10, 2.4)
    assert (found.window.first, found.window.last, found.step_time_s.std) == (31, 40, None)
    of_nemo = judged(nemo(step) for step in range(9, 50, 10))
    assert (of_nemo.status, of_nemo.step_time_s.mean) == ("success", pytest.approx(2.39))


@pytest.mark.parametrize("every", [10, 20, 25])
@pytest.mark.parametrize("rule", ["35-44", "all"])
def test_the_first_iteration_may_be_logged_besides_every_nth(every, rule):
    """As Megatron-LM does since core 0.16; it is no sign of another interval."""
    numbers = range(every, 51, every)
    assert judged(map(megatron, [1, *numbers]), rule).status == judged(map(megatron, numbers), rule).status
    assert judged(map(megatron, [1, *numbers]), "all").status == "success"


def test_the_last_steps_need_not_be_logged():
    assert judged((megatron(number, 55) for number in range(10, 51, 10)), "all").status == "success"
    assert judged((megatron(number, 60) for number in range(10, 51, 10)), "all").reason.startswith("died after step 50")


def test_a_line_that_is_missing_among_every_fifth_is_missing():
    found = judged(megatron(number) for number in range(5, 51, 5) if number != 40)
    assert (found.status, found.reason) == ("incomplete", "step 40 missing")


def test_a_window_between_the_logged_steps_is_empty():
    found = judged((megatron(number) for number in range(10, 51, 10)), "41-44")
    assert (found.status, found.reason) == ("too_few_steps", "steps 41-44: only one step in 10 is logged")


def epochs(steps, per_epoch, **fields):
    return [nemo(step, iteration=step % per_epoch, epoch=step // per_epoch, **fields) for step in range(steps)]


@pytest.mark.parametrize("fields", [{"last": 19}, {"last": 59}], ids=["iterations of an epoch", "of the run"])
def test_epochs_are_one_run(fields):
    """``iteration`` begins again in each epoch; ``global_step`` goes on."""
    found = judged(epochs(60, 20, **fields))
    assert (found.status, found.attempts, found.steps, found.max_step) == ("success", 1, 60, 59)
    assert found.reason == "steps 35-44 of 60"
    assert found.step_time_s.mean == pytest.approx(2 + 39.5 / 100)


def test_a_run_that_died_in_its_second_epoch_died():
    found = judged(epochs(30, 20, last=19), "all")
    assert (found.status, found.attempts) == ("incomplete", 1)
    assert found.reason.startswith("died after step 29 of 40")


def test_epochs_in_the_bars_of_nemo_1_are_one_run():
    bars = (
        f"Epoch {step // 20}: : 5%|#| {step % 20 + 1}/20 [00:02<00:02, v_num=a, reduced_train_loss=11.5,"
        f" global_step={step}.0, train_step_timing in s={2 + step / 100:.3f}]"
        for step in range(60)
    )
    found = judged(["\r".join(bars)])
    assert (found.status, found.attempts, found.reason) == ("success", 1, "steps 35-44 of 60")


@pytest.mark.parametrize("end", ["", "\nslurmstepd: error: a message\n"])
def test_a_value_that_a_line_end_cuts_does_not_count(end):
    lines = [nemo(step, seconds=12.34) for step in range(50)]
    before, after = lines[40].split("2.34")
    lines[40] = f"{before}{end}\n2.34{after}"
    found = judged(lines)
    assert (found.status, found.reason) == ("incomplete", "step 40 missing")


def test_a_field_that_only_some_lines_have_cuts_no_other():
    """Such as the loss of a validation, after the last field of the other lines."""
    lines = [nemo(step, end=" | val_loss: 7.1" if step % 10 == 9 else "") for step in range(50)]
    assert judged(lines).status == "success"


def test_two_lines_of_throughput_in_a_row_belong_to_two_iterations():
    lines = []
    for number in range(1, 51):
        utilization = f"Step Time : {2 + number / 100:.2f}s GPU utilization: {600 - number}.0MODEL_TFLOP/s/GPU"
        if number % 2:
            lines.append(utilization)
        else:  # the ranks that write the two kinds of lines are not in step
            lines += [utilization, megatron(number - 1), megatron(number)]
    found = judged(lines)
    assert found.status == "success"
    assert found.tflops_per_gpu.mean == pytest.approx(600 - 39.5)


def test_throughput_that_no_iteration_follows_is_not_taken_for_the_next():
    lines = ["Step Time : 125.37s GPU utilization: 20.9MODEL_TFLOP/s/GPU"]
    for number in range(1, 51):
        lines += [f"Step Time : {2 + number / 100:.2f}s GPU utilization: {600 - number}.0MODEL_TFLOP/s/GPU"]
        lines += [megatron(number)]
    assert judged(lines).tflops_per_gpu.mean == pytest.approx(600 - 39.5)


def test_skipped_iterations_of_the_window_are_counted():
    text = "\n".join([*(megatron(number, skipped=int(number in (1, 40))) for number in range(1, 51)), ""])
    assert read_log(io.BytesIO(text.encode()), "35-44").attempt.skipped_in_window == 1


def test_another_run_on_more_ranks_in_the_same_file_is_another_attempt():
    runs = [f"3: {megatron(number)}" for number in range(1, 21)] + [f"7: {megatron(number)}" for number in range(1, 51)]
    found = judged(runs)
    assert (found.status, found.attempts, found.steps) == ("success", 2, 50)


def test_names_tell_the_configuration_that_a_log_does_not(tmp_path):
    name = "log-acct.pretrain_llama3.1_8b_fp8_cs_gpus8_tp1_pp2_cp2_vpNone_1mbs_128gbs_4711_0.out"
    assert experiment_configuration(name) == {
        "workload": "pretrain_llama3.1",
        "size": "8b",
        "dtype": "fp8",
        "fp8_recipe": "current",
        "layout.gpus": 8,
        "layout.tp": 1,
        "layout.pp": 2,
        "layout.cp": 2,
        "layout.vp": 1,
        "layout.mbs": 1,
        "layout.gbs": 128,
    }
    assert experiment_configuration(name.replace("fp8_cs", "fp8_mx"))["dtype"] == "mxfp8"
    assert experiment_configuration("slurm-4711.out") == {}
    folder = tmp_path / "pretrain_mixtral_8x7b_bf16_64" / "1739000000"
    assert configuration_of(b"", folder / "slurm-1.out")["layout.gpus"] == 64
    printed = b"  world_size ....................... 128\n  tensor_model_parallel_size .... 4\n"
    found = configuration_of(printed, folder / "slurm-1.out")
    assert (found["layout.gpus"], found["layout.tp"], found["size"]) == (128, 4, "8x7b")
