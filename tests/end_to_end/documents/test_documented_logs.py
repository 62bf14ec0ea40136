# SPDX-License-Identifier: Apache-2.0
"""The log lines that the documents print, in the folders that they name: their figures, and what is said of them."""

from pathlib import Path
from typing import Any

import pytest
from called_here import call_llmb

EPOCH = (
    "Epoch 0: : 100%|##########| 50/50 [16:26<00:00, v_num=gjbq, reduced_train_loss=11.70, global_step=49.00, "
    "consumed_samples=12600.0, train_step_timing in s=12.80]\n"
)
"""24.11, line 18."""
LINES = Path(__file__).parents[2] / "data" / "documented_logs"
LLAMA_8B, NEMOTRON_15B = (path.read_text() for path in sorted(LINES.rglob("*.out")))
"""25.04: Llama 3.1, line 36, and Nemotron4, line 35."""
MAVERICK = "sft_llama4_e128_bf16_32nodes_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32"
LORA = "lora_llama3_70b_bf16_2nodes_tp1_pp4_cp1_vp20_ep1_etpNone_mbs1_gbs64"


def nemo_run(experiment: str, job: int, part: str = "") -> str:
    """Where NeMo-Run leaves a log: ``part`` distinguishes the experiment's profiled or traced task."""
    task = f"{experiment}{part}"
    return f"experiments/{experiment}/{experiment}_1750000000/{task}/log-acct.{task}_{job}_0.out"


def steps(mean: float, deviation: float, window: range, gbs: int, tflops: str = "") -> str:
    """50 steps; those of the window have this mean, and this deviation of a population."""
    lines = []
    for step in range(50):
        time = mean + (deviation if step % 2 else -deviation) if step in window else 2 * mean
        rate = f" | TFLOPS_per_GPU: {tflops}" if tflops else ""
        lines.append(
            f"Training epoch 0, iteration {step}/49 | lr: 1e-06 | global_batch_size: {gbs} | global_step: {step} | "
            f"reduced_train_loss: 2.0 | train_step_timing in s: {time:.4f} | consumed_samples: {gbs * step}{rate}\n"
        )
    return "".join(lines)


def place(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True)
    file.write_text(text)


def parsed(root: Path, *words: object) -> dict[str, Any]:
    (run,) = call_llmb("parse", root, "--json", *words).document["results"]
    return run


def judged(root: Path, *words: object) -> dict[str, Any]:
    (one,) = call_llmb("judge", root, "--json", *words).document["judged"]
    return one


LOGS = {
    # The example of 24.11 belongs to no row of its tables.
    "24.11 bf16": ("results/24.11/bf16/405b/576/log-nemo_llama3.1_405b_576_4711.out", EPOCH, "h100"),
    "24.11 fp8": ("results/24.11/fp8/405b/576/log-nemo_llama3.1_405b_576_4711.out", EPOCH, "h100"),
    "25.04 8b bf16": (nemo_run("pretrain_llama3.1_8b_bf16_8", 4711), LLAMA_8B, "h100"),
    # The document divides the same time by the peak of FP8.
    "25.04 8b fp8": (nemo_run("pretrain_llama3.1_8b_fp8_8", 4711), LLAMA_8B, "h100"),
    "25.04 15b": (nemo_run("pretrain_nemotron4_15b_bf16_64", 4711), NEMOTRON_15B, "h100"),
    "25.07": (nemo_run(MAVERICK, 3048691), steps(0.297, 0.003, range(11, 45), 32, "1.8e+02"), "h100"),
    "25.07 b200": (nemo_run(MAVERICK, 3048691), steps(0.224, 0.003, range(11, 45), 32), "b200"),
    "25.12": (nemo_run(LORA, 933609), steps(4.07, 0.009, range(35, 45), 64), "gb200"),
    "25.12 example": (nemo_run(LORA, 933609), steps(4.229, 0.009, range(35, 45), 64), "gb200"),
}


@pytest.mark.parametrize(
    ("log", "known", "tokens_per_s", "mfu_pct"),
    [
        # 8192 * 252 / 12.80; line 26 takes 12.84.
        ("24.11 bf16", ("pretrain_llama3.1", "405b", "bf16", 576, "24.11", "path"), 161280, None),
        ("25.04 8b bf16", ("pretrain_llama3.1", "8b", "bf16", 8, "25.04", "form of the name"), 84631, None),
        ("25.04 8b fp8", ("pretrain_llama3.1", "8b", "fp8", 8, "25.04", "form of the name"), 84631, 30.93),
        ("25.04 15b", ("pretrain_nemotron4", "15b", "bf16", 64, "25.04", "form of the name"), 389371, 65.25),
        # The example of line 59 has another time, 0.224 s.
        ("25.07", ("finetune_llama4-maverick", "400b", "bf16", 256, None, None), 441320, None),
        # Line 81 prints 10.47, which is not what its terms give.
        ("25.07 b200", ("finetune_llama4-maverick", "400b", "bf16", 256, None, None), 585143, 10.44),
        # The document's own terms with the time of its table; those of lines 72 and 101 have 4.229 s.
        ("25.12", ("finetune_llama3", "70b", "bf16", 8, None, None), 32204, 46.58),
        # Line 72 prints 30991.25, which is of 4.2293 s, and line 101 44.84.
        ("25.12 example", ("finetune_llama3", "70b", "bf16", 8, None, None), 30994, 44.83),
    ],
)
def test_a_log_gives_the_documents_throughput_and_mfu(
    tmp_path: Path, log: str, known: tuple[object, ...], tokens_per_s: int, mfu_pct: float | None
) -> None:
    path, text, gpu_type = LOGS[log]
    place(tmp_path, path, text)
    run = parsed(tmp_path, "--gpu-type", gpu_type)
    assert tuple(run[key] for key in ("workload", "size", "dtype", "gpus", "release", "release_source")) == known
    assert round(run["tokens_per_s_per_gpu"] * run["gpus"]) == tokens_per_s
    if mfu_pct is not None:
        assert run["mfu_pct"]["published"] == pytest.approx(mfu_pct, abs=0.015)


@pytest.mark.parametrize(
    ("log", "verdict", "delta_pct", "step_time_s", "said"),
    [
        ("25.04 8b bf16", "pass", 100 * (12.39 / 12.27 - 1), 12.27, "one time each"),
        ("25.04 15b", "pass", 100 * (2.693 / 2.67 - 1), 2.67, "one time each"),
        ("25.07", "pass", 0, 0.297, "as fast as published (-"),
        ("25.07 b200", "pass", 0, 0.224, "as fast as published (-"),
        ("25.12", "pass", 0, 4.07, "as fast as published (-"),
        ("25.12 example", "pass", 100 * (4.229 / 4.07 - 1), 4.07, "3.9 % slower than published"),
        # 12.80 s is of no row, and 12.39 s, printed for FP8, is a time of BF16: no verdict takes them for published.
        ("24.11 bf16", "improved", 100 * (12.80 / 17.20 - 1), 17.20, "25.6 % faster than published"),
        ("24.11 fp8", "regressed", 100 * (12.80 / 11.24 - 1), 11.24, "13.9 % slower than published"),
        ("25.04 8b fp8", "regressed", 100 * (12.39 / 9.33 - 1), 9.33, "32.8 % slower than published"),
    ],
)
def test_a_log_has_the_verdict_of_its_document(
    tmp_path: Path, log: str, verdict: str, delta_pct: float, step_time_s: float, said: str
) -> None:
    path, text, gpu_type = LOGS[log]
    place(tmp_path, path, text)
    found = judged(tmp_path, "--gpu-type", gpu_type)
    assert (found["verdict"], found["reference"]["step_time_s"]) == (verdict, step_time_s), found["sentence"]
    assert found["delta_pct"] == pytest.approx(delta_pct, abs=0.01)
    assert said in found["sentence"]
    effects = {one["key"]: one["effect"] for one in found["conditions"]}
    assert "window" not in effects, "the figure is of the same steps"
    assert effects.get("release") == (None if log.startswith(("24.11", "25.04")) else "noted")


def test_the_table_of_maverick_is_not_of_b200(tmp_path: Path) -> None:
    """The document has 0.224 s on B200, and does not say of which GPU type its table is."""
    path, text, _ = LOGS["25.07"]
    place(tmp_path, path, text)
    found = judged(tmp_path, "--gpu-type", "b200")
    assert (found["verdict"], found["reference"]["step_time_s"]) == ("regressed", 0.224)
    assert found["reference"]["source"].endswith("line 81")


def test_nodes_and_releases_that_are_not_known_are_not_guessed(tmp_path: Path) -> None:
    place(tmp_path / "a", nemo_run(LORA, 1), steps(4.07, 0.009, range(35, 45), 64))
    assert judged(tmp_path / "a")["reason"] == "the log does not report its GPU type, number of GPUs"
    reference = judged(tmp_path / "a", "--gpu-type", "h100")["reference"]
    assert reference["kind"] == "prediction", "two nodes are 8 GPUs on GB200 alone"
    assert reference["source"].endswith(
        "the catalogue has no recipe with the layout of this log; layout.tp 1, but 2 in the recipe"
    )
    log = "results/25.01/bf16/405b/576/log-nemo_llama3.1_405b_576_4711.out"
    place(tmp_path / "b", log, steps(17, 0.1, range(50), 252))
    assert judged(tmp_path / "b", "--gpu-type", "h100")["reason"] == (
        "the log is from release 25.01, but figures exist only for 24.11 and 25.04"
    )


@pytest.mark.parametrize(("part", "status"), [("_nsys", "profiled"), ("_nccltrace", "traced")])
def test_siblings_of_a_run_are_not_measurements(tmp_path: Path, part: str, status: str) -> None:
    experiment = "pretrain_llama3.1_8b_bf16_8"
    place(tmp_path, nemo_run(experiment, 4711), LLAMA_8B)
    place(tmp_path, nemo_run(experiment, 4712, part), LLAMA_8B)
    runs = call_llmb("parse", tmp_path, "--json").document["results"]
    assert [run["status"] for run in runs] == ["success", status]


@pytest.mark.parametrize(
    ("logs", "window", "mean"),
    [
        (["25.04 8b bf16"], (49, 49), 12.39),
        (["24.11 fp8"], (49, 49), 12.80),
        (["25.07"], (11, 44), 0.297),
        (["25.12"], (35, 44), 4.07),
        # One window is printed for all of a folder.
        (["25.07", "25.12"], (35, 44), 0.297),
    ],
)
def test_compat_takes_the_window_of_the_document(
    tmp_path: Path, logs: list[str], window: tuple[int, int], mean: float
) -> None:
    for log in logs:
        place(tmp_path, *LOGS[log][:2])
    document = call_llmb("parse", "--compat", "--format=json", tmp_path).document
    assert (document["analysis"]["min_iteration"], document["analysis"]["max_iteration"]) == window
    assert document["results"][-1]["time_mean"] == mean


def test_the_window_of_the_command_is_for_parse_compat_and_judge(tmp_path: Path) -> None:
    """Steps outside the document's window take twice the time here."""
    place(tmp_path, *LOGS["25.07"][:2])
    assert parsed(tmp_path)["window"] == {"first": 11, "last": 44, "rule": "reference"}
    assert parsed(tmp_path, "--window", "45-48")["step_time_s"]["mean"] == pytest.approx(0.594)
    (found,) = call_llmb("parse", "--compat", "--format=json", "--window=45-48", tmp_path).document["results"]
    assert found["time_mean"] == 0.594
    slow = judged(tmp_path, "--gpu-type", "h100", "--window", "45-48")
    assert (slow["verdict"], slow["delta_pct"]) == ("regressed", pytest.approx(100))
    assert ("window", "45-48", "11-44") in [(one["key"], one["own"], one["reference"]) for one in slow["conditions"]]


def test_scaling_stands_beside_the_figures_of_the_logs_own_release(tmp_path: Path) -> None:
    for gpus in (576, 1152):
        path = f"results/24.11/fp8/405b/{gpus}/log-nemo_llama3.1_405b_{gpus}_{gpus}.out"
        place(tmp_path, path, EPOCH.replace("12.80", f"11.{gpus}"))
    found = call_llmb("parse", tmp_path, "--scaling", "--json", "--gpu-type", "h100").document
    (recipe,) = found["scaling"]
    rows = {row["gpus"]: row for row in recipe["scales"] if row["runs"]}
    assert {gpus: row["published_s"] for gpus, row in rows.items()} == {576: 11.24, 1152: 11.31}
