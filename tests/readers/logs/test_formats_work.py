# SPDX-License-Identifier: Apache-2.0
"""Work, losses and clocks that lines of logs print beside their step times."""

import io
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from step_lines import step_line

from llmb.readers.logs.configuration import configuration_of
from llmb.readers.logs.formats.format import find_bad_loss
from llmb.readers.logs.outcome import LogOutcome, judge_log
from llmb.readers.logs.reader import read_log

START = datetime(2026, 4, 28, 14, 23)
NAMED = Path("/experiments/pretrain_llama3.1_8b_bf16_gpus8_tp1_pp1_cp2_vp1_mbs1_gbs128/log-a_1_0.out")


def judged(lines: Iterable[str], rule: str = "reference", path: Path | None = None) -> LogOutcome:
    return judge_log(read_log(io.BytesIO("".join(lines).encode()), rule, path=path))


def iteration(
    n: int, last: int = 50, *, s: float = 2.0, at_s: float | None = None, gbs: int = 128, samples: int | None = None,
    loss: str = "lm loss: 1.1E+01",
) -> str:  # fmt: skip
    stamp = START + timedelta(seconds=n * s if at_s is None else at_s)
    return (
        f" [{stamp:%Y-%m-%d %H:%M:%S}] iteration {n:8d}/{last:8d} |"
        f" consumed samples: {gbs * n if samples is None else samples:12d} |"
        f" elapsed time per iteration (ms): {1000 * s:.1f} | learning rate: 1.0E-06 | global batch size: {gbs:5d} |"
        f" {loss} | loss scale: 1.0 | grad norm: 2.870 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |\n"
    )


def nemo1(n: int, samples: int) -> str:
    return (
        f"Epoch 0: : {2 * n}%|##| {n + 1}/50 [00:02<01:50, v_num=gjbq, reduced_train_loss=11.90, global_step={n}.0,"
        f" consumed_samples={samples}.0, train_step_timing in s=2.0{n % 10}]\n"
    )


def maxtext(n: int, *, rate: float = 8192.0, tokens: int = 131072, seconds: float = 2.0, phase: str = "") -> str:
    return (
        f"{phase}completed step: {n}, seconds: {seconds:.3f}, TFLOP/s/device: 500.0, Tokens/s/device: {rate:.3f},"
        f" total_weights: {tokens}, loss: 9.5, lm_loss: 9.5\n"
    )


MAXTEXT_HEAD = "Config param steps: 50\n"


@pytest.mark.parametrize(
    "lines",
    [
        [iteration(n) for n in range(1, 51)],
        [step_line(n, global_batch_size=128) for n in range(50)],
        # Without the field, as early versions of NeMo 2 print it.
        [step_line(n, global_batch_size=128).replace(" global_batch_size: 128 |", "") for n in range(50)],
        [nemo1(n, 128 * (n + 1)) for n in range(50)],
    ],
    ids=["megatron", "llmb", "nemo2", "nemo1"],
)
def test_the_batch_of_the_lines_is_that_of_the_run(lines: list[str]) -> None:
    found = judged(lines)
    assert (found.status, found.gbs) == ("success", 128)
    assert judged(lines, path=NAMED).status == "success"
    other = judged(lines, path=Path(str(NAMED).replace("gbs128", "gbs64")))
    assert other.status == "invalid"
    assert other.reason == "the global batch size is 128 in the log's lines, but 64 in its name or arguments"
    assert other.step_time_s is None


def test_arguments_at_the_beginning_count_before_the_name() -> None:
    arguments = "tensor_model_parallel_size ...... 1\n  global_batch_size ............... 256\n"
    assert judged([arguments, *(iteration(n) for n in range(1, 51))]).status == "invalid"
    assert judged([arguments, *(iteration(n, gbs=256) for n in range(1, 51))], path=NAMED).status == "success"


def arguments(gpus: int) -> str:
    return f"  world_size ...... {gpus}\n  tensor_model_parallel_size ...... 1\n"


@pytest.mark.parametrize("resumes_at", [31, 1])
def test_a_layout_that_changes_between_steps_is_no_measurement(resumes_at: int) -> None:
    before, after = [iteration(n) for n in range(1, 31)], [iteration(n, at_s=99 + 2 * n) for n in range(resumes_at, 51)]
    found = judged([arguments(8), *before, "text\n" * 300_000, arguments(16), *after])
    assert (found.status, found.reason) == ("invalid", "gpus is 8 at first, but 16 in arguments between steps")
    assert judged([arguments(8), *before, arguments(8), *after, arguments(1)]).status == "success"
    meshes = [f"Building device mesh with parallelism: dp_shard={gpus}, tp=1\n" for gpus in (8, 16)]
    steps = [f"step: {n}  loss:  7.8  memory: 41.20GiB(51.78%)  tps: {5760 + n}  mfu: 33.74%\n" for n in range(1, 51)]
    batch = "global batch size 64, sequence length 8192, total steps 50\n"
    assert judged([meshes[0], batch, *steps[:30], meshes[1], batch, *steps[30:]]).reason == found.reason


def test_runs_that_log_to_one_file_are_no_measurement() -> None:
    found, alike = (
        judged(line for n in range(1, 51) for line in (iteration(n), iteration(n, s=s, at_s=2 * n))) for s in (2.4, 2.1)
    )
    reason = "steps are logged twice with different times, which sum to 20 s, and then to 24 s"
    assert (found.status, found.reason, alike.status) == ("invalid", reason, "success")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("  fp8 ............ hybrid\n  fp8_recipe ..... delayed\n", "fp8"),
        ("fp8: e4m3\nfp8_recipe: mxfp8\n", "mxfp8"),
        ("  fp8 ............ None\n  fp8_recipe ..... delayed\n", None),
    ],
)
def test_arguments_name_fp8(text: str, dtype: str | None) -> None:
    assert configuration_of((arguments(8) + text).encode(), None).get("dtype") == dtype


def test_a_batch_that_grows_in_the_window_is_no_measurement() -> None:
    def samples(n: int) -> int:
        return 64 * n if n < 40 else 64 * 39 + 128 * (n - 39)

    megatron = [iteration(n, gbs=64 if n < 40 else 128, samples=samples(n)) for n in range(1, 51)]
    found = judged(megatron)
    assert found.status == "invalid"
    assert found.reason == "the global batch size changes from 64 to 128 in step 40 of the window"
    assert judged(megatron, "10-30").gbs == 64
    assert judged(megatron, "41-50").gbs == 128
    nemo = [step_line(n, global_batch_size=64 if n < 40 else 128, consumed_samples=samples(n)) for n in range(50)]
    assert judged(nemo).reason.startswith("the global batch size changes from 64 to 128 in step 40")


@pytest.mark.parametrize("every", [1, 10])
def test_samples_that_do_not_fit_the_batch_are_no_measurement(every: int) -> None:
    numbers = range(every, 51, every)
    found = judged(iteration(n, samples=128 * n + (64 if n >= 40 else 0)) for n in numbers)
    assert found.status == "invalid"
    assert found.reason.startswith("the global batch size is 128 in step 40, but ")


def test_the_ramp_of_maxtext_is_no_measurement() -> None:
    phase = "[Rampup Batch Size Phase], "
    lines = [MAXTEXT_HEAD, *(maxtext(n, phase=phase if n < 40 else "") for n in range(50))]
    found = judged(lines)
    assert (found.status, found.reason) == ("invalid", "the global batch size is ramped up in step 35 of the window")
    assert judged(lines, "40-49").status == "success"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rate": 4096.0}, "according to its rate and time, step 40 has 8,192 tokens per GPU, but another step"),
        ({"seconds": 2000.0}, "according to its rate and time, step 40 has 16,384,000 tokens per GPU, but another"),
        ({"tokens": 65536}, "a step of the window has 65,536 tokens, but most have 131,072"),
    ],
)
def test_a_rate_and_the_tokens_of_a_step_have_to_fit(changed: dict[str, float], reason: str) -> None:
    found = judged([MAXTEXT_HEAD, *(maxtext(n, **(changed if n == 40 else {})) for n in range(50))])  # type: ignore[arg-type]
    assert found.status == "invalid"
    assert found.reason.startswith(reason)


def test_padding_is_no_other_batch() -> None:
    found = judged([MAXTEXT_HEAD, *(maxtext(n, tokens=131072 - 20000 * (n % 5)) for n in range(50))])
    assert found.status == "success"


def profiled_run(boundary: Iterable[int]) -> list[str]:
    hidden = "completed profiler activation/deactivation step: {}, total_weights: 131072, loss: 9.5\n"
    return [MAXTEXT_HEAD, *(hidden.format(n) if n in {*boundary} else maxtext(n) for n in range(50))]


def test_steps_that_maxtext_hides_were_done() -> None:
    found = judged(profiled_run([1, 2, 6, 7]))
    assert (found.status, found.max_step, found.steps) == ("success", 49, 50)
    inside = judged(profiled_run([36, 37, 41, 42]))
    assert inside.status == "profiled"
    assert inside.reason == (
        "a profiler ran in steps 36-42 of the window, and 4 steps without a time; profiling slows a run down"
    )
    between = judged(profiled_run([30, 31, 48, 49]))
    assert (between.status, between.max_step) == ("profiled", 49)


@pytest.mark.parametrize("name", ["lm loss", "loss", "mtp_1 loss", "load_balancing_loss"])
def test_a_loss_that_is_not_finite_counts_whatever_its_name(name: str) -> None:
    lines = [iteration(n, loss=f"lm loss: 2.0 | {name}: {'nan' if n > 20 else '1.2E+01'}") for n in range(1, 51)]
    assert judged(lines).reason == "loss is nan from step 21"
    nemo = [
        step_line(n).replace(" | train_step", f" | {name}: {'inf' if n > 20 else '1.5'} | train_step")
        for n in range(50)
    ]
    assert judged(nemo).reason == "loss is inf from step 21"


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        (" loss scale: nan |", None),
        (" val_loss: nan |", None),
        (" validation loss: nan |", None),
        (" number of nan iterations:   0 |", None),
        (" lm loss: NAN |", "nan"),
        ("reduced_train_loss=nan.0, x=1", "nan"),
        (" z_loss: -inf", "-inf"),
    ],
)
def test_losses_of_evaluations_and_their_scale_are_none_of_the_training(text: str, loss: str | None) -> None:
    found = find_bad_loss(text.encode())
    assert (None if found is None else str(found)) == loss


@pytest.mark.parametrize(("every", "first"), [(1, 0), (10, 0), (1, 30), (10, 30)])
def test_the_second_line_of_megatron_may_have_the_time_of_the_first_in_it(every: int, first: int) -> None:
    """The first iteration takes 30 s and each other 2 s; ``first`` were done before."""
    loaded = f"successfully loaded checkpoint from /ckpt [ t 1/1, p 1/1 ] at iteration {first}\n" if first else ""
    numbers = [first + 1, *(n for n in range(first + 2, first + 51) if n % every == 0)]
    lines = [loaded]
    for place, n in enumerate(numbers):
        done = n - first
        mean_s = {0: 30.0, 1: (30 + 2 * (done - 1)) / done}.get(place, 2.0)
        lines.append(iteration(n, first + 50, s=mean_s, at_s=30 + 2 * (done - 1)))
    found = judged(lines, "all")
    assert found.status == "success"
    assert found.step_time_s and found.step_time_s.mean == pytest.approx((30 + 49 * 2) / 50)
    assert judged(lines).step_time_s and judged(lines).step_time_s.mean == pytest.approx(2.0)


@pytest.mark.parametrize("every", [1, 10])
def test_a_second_line_of_its_own_is_left_as_it_is(every: int) -> None:
    """Versions before 2026 start the timer again behind the first iteration."""
    numbers = [1, *(n for n in range(2, 51) if n % every == 0)]
    lines = [
        iteration(n, s=30 if n == 1 else 2.5 if n <= 10 else 2.0, at_s=30 + 2.5 * min(n - 1, 9) + 2 * max(n - 10, 0))
        for n in numbers
    ]
    found = judged(lines, "all")
    assert found.step_time_s and found.step_time_s.mean == pytest.approx((30 + 9 * 2.5 + 40 * 2) / 50)


@pytest.mark.parametrize(
    "between",
    [
        " validation loss at iteration {} | lm loss value: 3.2E+00 | lm loss PPL: 2.4E+01 |\n",
        "  successfully saved checkpoint from iteration {} to /ckpt\n",
    ],
)
def test_an_evaluation_behind_every_line_is_no_contradiction(between: str) -> None:
    lines = [iteration(n, 100, at_s=8 * n) + between.format(n) for n in range(10, 101, 10)]
    found = judged(lines)
    assert found.status == "success", found.reason
    assert found.step_time_s and found.step_time_s.mean == 2.0
    without = judged(iteration(n, 100, at_s=8 * n) for n in range(10, 101, 10))
    assert without.reason == "10 steps of the window take 20 s, but 80 s by the clock"


@pytest.mark.parametrize(
    ("text", "gpu_type"),
    [
        ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", "h100"),
        ("CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory", "h100"),
        ("device NVIDIA H200", "h200"),
        ("|   0  NVIDIA B200                    On  |", "b200"),
        ("GPU 0: NVIDIA H100 PCIe (UUID: GPU-1)", "h100-pcie"),
        ("device NVIDIA H100 NVL", "h100-nvl"),
        ("device NVIDIA H200 NVL", "h200-nvl"),
        ("device NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"),
        (
            "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n  MIG 3g.40gb     Device  0: (UUID: M)",
            "NVIDIA H100 80GB HBM3 MIG",
        ),
        ("GPU 0: NVIDIA H100 80GB HBM3\nGPU 1: NVIDIA A100-SXM4-80GB", "a100 and h100"),
        ("NVIDIA H20", "NVIDIA H20"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200 480GB"),
        # Any variant may be meant.
        ("trained on NVIDIA H100 GPUs", None),
        ("NVIDIA Release 25.04 (build 1)", None),
    ],
)
def test_only_the_very_variant_of_a_gpu_has_its_type(text: str, gpu_type: str | None) -> None:
    assert configuration_of(f"{text}\n".encode(), None).get("gpu_type") == gpu_type


def test_a_mean_in_another_unit_contradicts_the_clock() -> None:
    lines = [iteration(n) for n in range(10, 51, 10)]
    lines[3] = lines[3].replace("(ms)", "(s)")
    found = judged(lines)
    assert (found.status, found.step_time_s) == ("invalid", None)
    assert found.reason == "step times of the window sum to 2e+04 s, but 20 s passed by the clock"


def test_a_clock_that_jumps_is_noted() -> None:
    lines = [iteration(n, at_s=2 * n - (3600 if n == 40 else 0)) for n in range(1, 51)]
    found = judged(lines)
    assert (found.status, found.warnings) == ("success", ("the clock of the log's lines goes back in the window",))
    later = judged(iteration(n, at_s=2 * n + (3600 if n >= 40 else 0)) for n in range(1, 51))
    assert later.warnings == ("between two lines of the window 3602 s passed, of which steps took 2 s",)
