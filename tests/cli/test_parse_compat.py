# SPDX-License-Identifier: Apache-2.0
"""``llmb parse --compat`` in the place of the reference suite's script, and that script's way of reading our logs."""

import csv
import json
import math
import subprocess
from functools import partial
from pathlib import Path

import pytest
from called_here import call_llmb
from step_lines import step_line

READER = Path(__file__).parents[1] / "support" / "reference_parser.sh"
LORA = "lora_llama3_70b_bf16_2nodes_tp1_pp4_cp1_vp20_ep1_etpNone_mbs1_gbs64"
NEMOTRON = "pretrain_nemotron4_15b_fp8_gpus16_tp1_pp1_cp1_vp1_mbs2_gbs64"
SFT = "sft_llama4_e128_bf16_32nodes_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32"


def nemo_line(step: int, time: float, tflops: str | None, last: int = 49, loss: float = 11.5) -> str:
    """As NeMo 2 writes it: TFLOPS rounded to few digits, and not by every version."""
    rate = "" if tflops is None else f" | TFLOPS_per_GPU: {tflops}"
    return (
        f"Training epoch 0, iteration {step}/{last} | lr: 4.491e-06 | global_batch_size: 128 | global_step: {step}"
        f" | peak_memory_usage: 70833405952 | reduced_train_loss: {loss:.4g} | train_step_timing in s: {time:.4g}"
        f"{rate} | consumed_samples: {128 * (step + 1)}"
    )


def log(folder: Path, experiment: str, job: int, text: str, retry: int = 0) -> None:
    """Where NeMo-Run leaves it."""
    run = folder / experiment / f"{experiment}_17500{job}" / experiment
    run.mkdir(parents=True, exist_ok=True)
    (run / f"log-acct_team.{experiment}_{job}_{retry}.out").write_text(text)
    (run / f"sbatch_acct_team.{experiment}_{job}.out").write_text("experiment submitted\n")


def steps(count: int, base: float, tflops: float | None, last: int = 49, loss: float = 11.5) -> str:
    lines = []
    for step in range(count):
        time = base + 0.01 * (step * 7 % 5) + (30 if step == 0 else 0)
        rate = None if tflops is None else f"{tflops + step % 3:.3g}"
        lines.append(nemo_line(step, time, rate, last, loss))
    return "setting up the model\n" + "\n".join(lines) + "\n"


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of successes and failures that the reference suite's script counts."""
    folder = tmp_path / "experiments"
    log(folder, LORA, 933609, steps(50, 4.07, None))
    log(folder, NEMOTRON, 228, steps(50, 0.787, 1856))
    log(folder, NEMOTRON, 229, steps(50, 0.791, 1849), retry=1)
    log(folder, SFT, 3048691, steps(41, 0.297, 183))
    log(folder, SFT, 3048692, "loading the model\nRuntimeError: NCCL error\n")
    log(folder, f"{SFT}_nccltrace", 3048693, steps(5, 0.9, 60, 4))
    (folder / "vboost_1.out").write_text("iteration\n")
    (folder / "prepare_squad_dataset_exp_7.out").write_text("training data\n")
    monkeypatch.chdir(tmp_path)
    return folder


parse = partial(call_llmb, "parse", "--compat")


TABLE = f"""\
Train Step Timing and TFLOPS Analysis (iterations 35-44)
================================================================================
Experiment                                                                                   Status Time Mean (s) Time Std (s) TFLOPS_per_GPU Mean TFLOPS_per_GPU Std
{90 * "-"} -------- ------------- ------------ ------------------- ------------------
lora_llama3_70b_bf16_2nodes_tp1_pp4_cp1_vp20_ep1_etpNone_mbs1_gbs64_933609                  Success         4.090        0.014                   -                  -
pretrain_nemotron4_15b_fp8_gpus16_tp1_pp1_cp1_vp1_mbs2_gbs64_228                            Success         0.807        0.014             1860.00               0.00
pretrain_nemotron4_15b_fp8_gpus16_tp1_pp1_cp1_vp1_mbs2_gbs64_229_1.out                      Success         0.811        0.014             1850.00               0.00
sft_llama4_e128_bf16_32nodes_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_3048691                    Failed                (40 iterations)
sft_llama4_e128_bf16_32nodes_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_3048692                    Failed             -            -                   -                  -

Summary:
  Success experiments: 3
  Failed experiments: 2
  Success rate: 60%
"""  # noqa: E501 (the very text)
CSV = f"""\
filename,status,time_mean_seconds,time_std_dev_seconds,tflops_per_gpu_mean,tflops_per_gpu_std_dev,max_iteration
log-acct_team.{LORA}_933609_0.out,Success,4.090,0.014,-,-,
log-acct_team.{NEMOTRON}_228_0.out,Success,0.807,0.014,1860.00,0.00,
log-acct_team.{NEMOTRON}_229_1.out,Success,0.811,0.014,1850.00,0.00,
log-acct_team.{SFT}_3048691_0.out,Failed,,,,,40
log-acct_team.{SFT}_3048692_0.out,Failed,,,,,
# Summary: 3 success, 2 failed, 5 total
"""
JSON = f"""\
{{
  "analysis": {{
    "min_iteration": 35,
    "max_iteration": 44,
    "experiments_directory": "experiments"
  }},
  "results": [
    {{"filename": "log-acct_team.{LORA}_933609_0.out", "status": "Success", "time_mean": 4.090, "time_std_dev": 0.014, \
"tflops_per_gpu_mean": null, "tflops_per_gpu_std_dev": null}},
    {{"filename": "log-acct_team.{NEMOTRON}_228_0.out", "status": "Success", "time_mean": 0.807, \
"time_std_dev": 0.014, \
"tflops_per_gpu_mean": 1860.00, "tflops_per_gpu_std_dev": 0.00}},
    {{"filename": "log-acct_team.{NEMOTRON}_229_1.out", "status": "Success", "time_mean": 0.811, \
"time_std_dev": 0.014, \
"tflops_per_gpu_mean": 1850.00, "tflops_per_gpu_std_dev": 0.00}},
    {{"filename": "log-acct_team.{SFT}_3048691_0.out", "status": "Failed", "max_iteration": 40}},
    {{"filename": "log-acct_team.{SFT}_3048692_0.out", "status": "Failed"}}
  ],
  "summary": {{
    "success_experiments": 3,
    "failed_experiments": 2,
    "success_rate": 60
  }}
}}
"""


@pytest.mark.usefixtures("experiments")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], TABLE),
        (["--format=table", "experiments"], TABLE),
        (["--format=csv"], CSV),
        (["--format=json"], JSON),
        (["--json"], JSON),
    ],
)
def test_the_output_is_that_of_the_reference_suite(arguments: list[str], expected: str) -> None:
    result = parse(*arguments)
    assert result.stdout == expected
    assert result.returncode == 0


def test_the_expected_table_is_what_the_reference_way_of_reading_gives(experiments: Path) -> None:
    done = subprocess.run(["bash", READER, "experiments"], cwd=experiments.parent, capture_output=True, text=True)
    assert (done.stdout, done.returncode, done.stderr) == (TABLE, 0, "")


def test_the_reference_way_of_reading_reads_our_logs(tmp_path: Path) -> None:
    """No value is cut: step times have no exponent, and no field hides another one."""
    folder = tmp_path / "experiments"
    for number, base in enumerate((0.000_812_345, 0.912_345, 12.612_345, 31_234.512)):
        for name, tflops in (("bf16", 612.345), ("fp8", None)):
            run = folder / f"pretrain_nemotron4_15b_{name}_gpus8" / f"{number}"
            run.mkdir(parents=True)
            times = (base * (1 + step % 4 / 500) for step in range(50))
            text = "".join(
                step_line(step, step_time_s=time, tflops_per_gpu=tflops, consumed_samples=128 * (step + 1))
                for step, time in enumerate(times)
            )
            (run / f"log-acct.pretrain_nemotron4_15b_{name}_gpus8_{number}_0.out").write_text(f"starting\n{text}")
    died = folder / "log-acct.pretrain_nemotron4_15b_bf16_gpus8_99_0.out"
    died.write_text("".join(map(step_line, range(40))))
    done = subprocess.run(["bash", READER, folder], capture_output=True, text=True)
    assert done.stdout == parse(folder).stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert "Success experiments: 8\n" in done.stdout and "(39 iterations)" in done.stdout


def rows(folder: Path, *arguments: str) -> dict[str, list[str]]:
    lines = parse(folder, "--format=csv", *arguments).stdout.splitlines()
    assert {len(row) for row in csv.reader(lines[:-1])} == {7}
    return {row[0]: row[1:] for row in csv.reader(lines[1:-1])}


def test_every_run_is_counted_whatever_its_number_of_steps_and_wherever_it_died(tmp_path: Path) -> None:
    """The reference suite's script leaves such runs out, and so its success rate is wrong."""
    for name, text in {
        "good": steps(50, 2, 600),
        "hundred": steps(100, 2, 600, last=99),
        "early": steps(20, 2, 600),
        "late": steps(47, 2, 600),
        "short": steps(20, 2, 600, last=19),
        "nan": steps(50, 2, 600, loss=math.nan),
        "hole": "".join(f"{line}\n" for line in steps(50, 2, 600).splitlines() if "iteration 38/" not in line),
        "empty": "",
        "profiled": steps(50, 2, 600) + "Capture range ended in the application.\n",
    }.items():
        (tmp_path / f"log-acct.pretrain_x_{name}_1_0.out").write_text(text)
    found = {name.split("_")[2]: (row[0], row[-1]) for name, row in rows(tmp_path).items()}
    assert found == {
        "good": ("Success", ""),
        "hundred": ("Success", ""),
        "early": ("Failed", "19"),
        "late": ("Success", ""),
        "short": ("Failed", "19"),
        "nan": ("Failed", "44"),
        "hole": ("Failed", "44"),
        "empty": ("Failed", ""),
    }
    document = json.loads(parse(tmp_path, "--json").stdout)
    assert document["summary"] == {"success_experiments": 3, "failed_experiments": 5, "success_rate": 37}


def test_values_that_the_reference_suite_misreads_are_read(tmp_path: Path) -> None:
    """Its script cuts exponents, takes the mean of all attempts, and fails runs of other programs."""
    bridge = Path(__file__).parents[1] / "readers" / "logs" / "samples" / "megatron_bridge.log"
    for name, text in {
        "exponent": steps(50, 12345.678, 600),
        "restarted": steps(47, 9, 600) + steps(50, 2, 600),
        "bridge": bridge.read_text(),
    }.items():
        (tmp_path / f"log-acct.pretrain_x_{name}_1_0.out").write_text(text)
    (tmp_path / "sbatch_acct.pretrain_x.out").write_text(steps(50, 2, 600))
    found = {name.split("_")[2]: row[1] for name, row in rows(tmp_path).items()}
    assert found == {"exponent": "12350.000", "restarted": "2.020", "bridge": "2.395"}


def test_other_options_and_links(experiments: Path) -> None:
    before = parse().stdout
    (experiments / "link.out").symlink_to(next(experiments.rglob("log-acct_team.lora*.out")))
    assert parse().stdout == before, "links are not followed"
    table = parse("--full-names", experiments, "--window", "11-44").stdout.splitlines()
    assert table[0] == "Train Step Timing and TFLOPS Analysis (iterations 11-44)"
    assert table[4].startswith(f"log-acct_team.{LORA}_933609_0.out ")
    assert rows(experiments, "--window", "30-40")[f"log-acct_team.{SFT}_3048691_0.out"][0] == "Success"


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("log-acct.grok1_314b_bf16_256_388660_0.out", "grok1_314b_bf16_256_388660"),
        ("log-my.acct.pretrain_llama3.1_8b_8_7_0.out", "pretrain_llama3.1_8b_8_7"),
        ("log-pretrain_llama3.1_8b_bf16_gpus8.out", "pretrain_llama3.1_8b_bf16_gpus8.out"),
        ("log-run.out", "run.out"),
    ],
)
def test_names_that_have_dots_are_whole(tmp_path: Path, file_name: str, name: str) -> None:
    (tmp_path / file_name).write_text(steps(50, 2, None))
    assert parse(tmp_path).stdout.splitlines()[4].startswith(f"{name} ")


@pytest.mark.parametrize("arguments", [["nowhere"], ["--nonsense"], ["--window", "auto"], ["--format=xml"]])
def test_every_error_has_exit_code_1(experiments: Path, arguments: list[str]) -> None:
    result = parse(*arguments)
    assert (result.returncode, result.stdout) == (1, "")
    empty = experiments / "none"
    empty.mkdir()
    assert parse(empty).returncode == 1


def test_no_success_has_exit_code_1_and_an_output(tmp_path: Path) -> None:
    (tmp_path / "log-acct.sft_x_1_0.out").write_text(steps(40, 2, 600))
    for form, end in (("table", "  Success rate: 0%\n"), ("json", '"success_rate": 0\n  }\n}\n'), ("csv", "1 total\n")):
        result = parse(tmp_path, "--format", form)
        assert result.returncode == 1
        assert result.stdout.endswith(end)
    (tmp_path / "log-acct.sft_x_1_0.out").rename(tmp_path / "sbatch_acct.sft_x_1.out")
    assert parse(tmp_path).stdout.endswith("  Success rate: N/A\n")
    assert json.loads(parse(tmp_path, "--json").stdout)["summary"]["success_rate"] is None


BRIDGE_STEPS = "".join(
    f"Step Time : {(9089 + step) / 1000:.2f}s GPU utilization: {600 + step}.5MODEL_TFLOP/s/GPU\n"
    f" [2025-12-19 10:49:15] iteration {step:8d}/      50 | consumed samples: 256 | elapsed time per iteration (ms):"
    f" {9089 + step}.0 | lm loss: 1.0E+01 | number of nan iterations:   0 |\n"
    for step in range(1, 51)
)


def test_the_form_of_the_script_for_megatron_bridge(tmp_path: Path) -> None:
    log(tmp_path, "pretrain_llama3.1_8b", 1, BRIDGE_STEPS)
    log(tmp_path, "pretrain_llama3.1_8b", 2, BRIDGE_STEPS[: len(BRIDGE_STEPS) * 4 // 5])
    done = call_llmb("parse", "--compat-bridge", tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == "Elapsed Time (ms) and MODEL_TFLOPS/GPU Analysis (iterations 35-44)"
    assert lines[2].split()[-4:] == ["MODEL_TFLOPS_per_GPU", "Mean", "MODEL_TFLOPS_per_GPU", "Std"]
    assert lines[4].split()[1:] == ["Success", "9128.500", "3.028", "640.00", "3.03"]  # sqrt(82.5 / 9)
    assert lines[5].split()[1:] == ["Failed", "(40", "iterations)"]
    found = call_llmb("parse", "--compat-bridge", "--format", "json", str(tmp_path)).document
    assert found["results"][0]["time_mean_ms"] == 9128.5
    assert list(found["results"][0])[2:] == ["time_mean_ms", "time_std_ms", "tflops_mean", "tflops_std"]
    text = call_llmb("parse", "--compat-bridge", "--format=csv", str(tmp_path)).stdout
    header = "filename,status,time_mean_ms,time_std_dev_ms,tflops_per_gpu_mean,tflops_per_gpu_std_dev,max_iteration"
    assert text.splitlines()[0] == header
