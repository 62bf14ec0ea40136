# SPDX-License-Identifier: Apache-2.0
"""The rows of Megatron-Bridge's tables: figures as printed, layouts, and logs that are judged by them."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.bridge_figures import PREFIX, PublishedFigure
from llmb.catalogue.catalogue import DATA, Catalogue
from llmb.catalogue.model_name import split_model
from llmb.catalogue.records import Convention
from llmb.catalogue.resolve import Overrides, Request, releases_of, resolve
from llmb.catalogue.throughput import flops_per_sequence, model_flops, parameter_count, throughput
from llmb.jobs.read_run import parsed_run
from llmb.prediction.prediction import BRIDGE, predicted_step
from llmb.runs.choices import Choices
from llmb.runs.plan import make_plan
from llmb.runs.result import Verdict
from llmb.verdict.catalogue_figures import with_stated
from llmb.verdict.judge_run import judge_published

CATALOGUE = Catalogue()
with (DATA / "megatron_bridge.csv").open(newline="") as stream:
    ROWS = list(csv.DictReader(stream))
FIGURES = dict(zip(range(len(ROWS)), CATALOGUE.bridge.figures, strict=True))


def test_every_row_is_a_figure_as_printed() -> None:
    assert len(ROWS) == 191
    for row, figure in zip(ROWS, CATALOGUE.bridge.figures, strict=True):
        expected = figure.expectation
        assert (figure.gpu_type, figure.gpus, expected.line) == (row["gpu"], int(row["gpus"]), int(row["line"]))
        assert expected.release == PREFIX + row["release"]
        assert expected.tflops_per_gpu == float(row["tflops_per_gpu"])
        assert expected.tokens_per_s == float(row["tokens_per_s_per_gpu"]) * figure.gpus
        assert (expected.window, expected.window_reason) == (None, "the table does not state the steps")
        printed = expected.tokens_per_s * expected.step_time_s / (int(row["gbs"]) * int(row["seq"]))
        rounding = float(row["rounding_pct"] or 0) / 100 + 0.007
        assert printed == pytest.approx(1, rel=rounding), "of tokens/s, or of TFLOP/s where those are rounded"
        assert {name: figure.sizes[name] for name in ("tp", "pp", "cp", "mbs", "gbs")} == {
            name: int(row[name]) for name in ("tp", "pp", "cp", "mbs", "gbs")
        }


REPOSITORY = "LLMB_BRIDGE_REPOSITORY"
"""Variable that names a clone of Megatron-Bridge."""


def differing(row: Mapping[str, str], line: str) -> list[str]:
    """The columns of a row that its line, a row of a table in Markdown, does not have."""
    numbers = set(re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", line)))
    columns = ("gpus", "gbs", "mbs", "tp", "pp", "cp", "vp", "ep", "tokens_per_s_per_gpu", "tflops_per_gpu")
    return [name for name in columns if row[name] and row[name] not in numbers]


def headings(lines: Sequence[str], number: int) -> str:
    """The headings of each level above a line."""
    above: dict[int, str] = {}
    for line in lines[:number]:
        if mark := re.match("#+ ", line):
            above = {level: text for level, text in above.items() if level < len(mark[0])} | {len(mark[0]): line}
    return " / ".join(above.values())


PRECISIONS = {"fp8-cs": ("FP8", "FP8-CS"), "mxfp8": ("MXFP8",), "nvfp4": ("NVFP4",), "bf16": ("BF16",)}
TASKS = {"pretrain": "Pre-Training", "sft": "SFT", "lora": "LoRA"}


def misplaced(row: Mapping[str, str], lines: Sequence[str]) -> list[str]:
    """The columns of a row that neither its line nor the headings above it have."""
    above, line = headings(lines, int(row["line"])), lines[int(row["line"]) - 1]
    cells = {cell.strip() for cell in line.split("|")} | {above.partition("Model: ")[2], above.partition("System: ")[2]}
    wrong = {
        "release": f"## {row['release']} NeMo" not in above,
        "task": f"{TASKS[row['task']]} Performance" not in above,
        "gpu": f"DGX-{row['gpu'].upper()}" not in cells,
        "model": not any(re.match(rf"{re.escape(row['model'])}( \(\w+\))?$", cell) for cell in cells),
        "dtype": row["release"] != "25.09" and not cells & {*PRECISIONS[row["dtype"]]},
    }
    return [name for name, is_wrong in wrong.items() if is_wrong]


def test_every_row_stands_in_its_line_of_the_tables(needs: Callable[[str, bool, str], None]) -> None:
    clone = os.environ.get(REPOSITORY, "")
    needs("bridge", bool(clone), f"{REPOSITORY} names no clone of https://github.com/NVIDIA-NeMo/Megatron-Bridge")
    files = {}
    for commit, path in {(row["commit"], row["path"]) for row in ROWS}:
        show = ["git", "-C", clone, "show", f"{commit}:{path}"]
        files[path] = subprocess.run(show, capture_output=True, check=True, text=True).stdout.splitlines()
    differences = [
        (row["line"], [*differing(row, lines[int(row["line"]) - 1]), *misplaced(row, lines)])
        for row in ROWS
        for lines in [files[row["path"]]]
    ]
    assert [(line, names) for line, names in differences if names] == []


def test_a_row_that_differs_from_its_line_is_found() -> None:
    line = "| DeepSeekV3 | FP8-CS, MXFP8 | 256 | 2048 | 4096 | 1 | 1 | 16 | 1 | 1 | 8 | 2,265 / 2,159 | 589 / 562 |"
    assert differing(ROWS[0], line) == []
    other = line.replace("2,265", "2,266").replace("589", "598")
    assert differing(ROWS[0], other) == ["tokens_per_s_per_gpu", "tflops_per_gpu"]


def described() -> list[PublishedFigure]:
    undescribed = CATALOGUE.undescribed
    return [one for one in CATALOGUE.bridge.figures if one.size not in undescribed.get(one.workload, ())]


def request_of(figure: PublishedFigure) -> Request:
    return Request(
        workload=figure.workload,
        size=figure.size,
        dtype=figure.dtype,
        gpu_type=figure.gpu_type,
        scale=figure.gpus,
        release=figure.expectation.release,
        overrides=Overrides(gbs=figure.sizes["gbs"]),
    )


def test_every_row_of_a_described_model_is_a_recipe_with_its_figure() -> None:
    impossible = [figure for figure in described() if "no such layout" in " ".join(figure.expectation.notes)]
    assert len(impossible) == 1
    for figure in described():
        if figure in impossible:
            continue
        recipe = resolve(CATALOGUE, request_of(figure))
        assert figure.expectation in recipe.expectations
        assert not recipe.overridden
        flops = throughput(recipe, figure.expectation.step_time_s).tflops_per_gpu[Convention.PUBLISHED]
        assert flops == pytest.approx(figure.expectation.tflops_per_gpu, rel=0.007)
        causal = flops_per_sequence(recipe, Convention.CAUSAL)
        packed = flops_per_sequence(recipe, Convention.PACKED)
        counted = packed if recipe.task == "lora" else causal
        # gpt-oss was counted otherwise until 26.04.01, and Mamba layers count as twice as wide as the hidden size.
        otherwise = {("pretrain_gpt_oss", "bf16"), ("pretrain_nemotron3", "30b")}
        if not otherwise & {(figure.workload, figure.dtype), (figure.workload, figure.size)}:
            assert flops_per_sequence(recipe, Convention.PUBLISHED) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("model", "size", "billions", "tflop_per_token", "seq_len"),
    [
        ("qwen3", "30b", 30.5, 0.02308, 4096),
        ("qwen3", "235b", 235, 0.14833, 4096),
        ("gpt_oss", "20b", 20.9, 0.02285, 4096),
        ("gpt_oss", "120b", 116.8, 0.03260, 4096),
        ("deepseek-v3", "671b", 671, 0.2600, 4096),
        ("kimi-k2", "1t", 1026, 0.20446, 4096),
        ("nemotron3", "30b", 31.6, 0.0222756 * 0.9325, 8192),  # 23 Mamba layers are 4,096 wide, not 5,376
        ("nemotron3", "120b", 120.6, 0.084723, 8192),
    ],
)
def test_models_are_as_large_as_published_and_cost_as_many_flops(
    model: str, size: str, billions: float, tflop_per_token: float, seq_len: int
) -> None:
    record = CATALOGUE.models[model, size]
    assert parameter_count(record)[0] / 1e9 == pytest.approx(billions, rel=0.002)
    assert model_flops(record, seq_len, causal=True) / seq_len / 1e12 == pytest.approx(tflop_per_token, rel=0.01)


def test_megatron_bridge_is_the_default_only_where_the_suite_has_nothing() -> None:
    for workload, size in (("pretrain_llama3.1", "70b"), ("finetune_llama3", "70b")):
        newest = releases_of(CATALOGUE.workloads[workload], size)[-1]
        for gpu_type in CATALOGUE.gpus:
            assert resolve(CATALOGUE, Request(workload=workload, size=size, gpu_type=gpu_type)).release == newest
    by_type = {"h100": "mb-26.06", "b200": "mb-26.04.01", "gb300": "mb-26.08", "h200": "mb-26.06"}
    for gpu_type, release in by_type.items():
        recipe = resolve(CATALOGUE, Request(workload="pretrain_qwen3", size="30b", gpu_type=gpu_type))
        assert recipe.release == release
    request = Request(workload="pretrain_llama3.1", size="405b", gpu_type="gb300", dtype="nvfp4")
    assert resolve(CATALOGUE, request).release == "mb-26.06"
    newest = Request(workload="pretrain_llama3.1", size="405b", gpu_type="h100", release="mb")
    assert (resolve(CATALOGUE, newest).release, resolve(CATALOGUE, newest).dtype) == ("mb-26.06", "fp8")


def test_the_batch_selects_between_rows_and_larger_scales_are_marked() -> None:
    request = Request(workload="pretrain_deepseek-v3", size="671b", gpu_type="gb300", release="mb-26.06")
    assert resolve(CATALOGUE, request).layout.gbs == 4096
    scaled = resolve(CATALOGUE, Request(workload="pretrain_deepseek-v3", size="671b", gpu_type="gb300", scale=512))
    assert scaled.decisions == ("2 times the largest published scale, 256 GPUs",)
    assert (scaled.layout.gbs, scaled.figure) == (8192, None)


def test_the_engine_refuses_by_name_what_it_does_not_have() -> None:
    parts = "lacks mxfp8, attention sinks, sliding window, expert biases, clamped GLU, YaRN"
    recipe = resolve(CATALOGUE, Request(workload="pretrain_gpt_oss", size="120b", gpu_type="gb300"))
    with pytest.raises(UsageError, match=f"{parts}: Megatron-Bridge or torchtitan may support this recipe"):
        make_plan(recipe, Choices(), device="cuda")
    tuned = resolve(CATALOGUE, Request(workload="sft_llama3", size="70b", gpu_type="h100", release="mb"))
    assert predicted_step(CATALOGUE, make_plan(tuned, Choices(), device="cuda"), BRIDGE) is not None


def test_a_model_that_is_not_described_has_only_figures(tmp_path: Path) -> None:
    for form in (("pretrain_nemotron3", "550b"), ("pretrain_deepseek-v4", "flash")):
        with pytest.raises(UsageError, match=f"figures for {form[0]} {form[1]}, but no description") as caught:
            resolve(CATALOGUE, Request(workload=form[0], size=form[1]))
        assert caught.value.do == f"judge a log instead: 'llmb judge LOG -w {form[0]} -s {form[1]}'"
        assert split_model(CATALOGUE, "_".join(form)) == form
    assert sum(figure.size in CATALOGUE.undescribed.get(figure.workload, ()) for figure in CATALOGUE.figures) == 5
    row, figure = ROWS[LOGGED[-1]], FIGURES[LOGGED[-1]]
    path = log_of(tmp_path / "log.out", row, figure, int(row["gbs"]), 1.0)
    stated = {"workload": figure.workload, "size": figure.size, "dtype": figure.dtype, "layout.gpus": figure.gpus}
    (run,) = with_stated([parsed_run(path, "35-44")], {**stated, "gpu_type": figure.gpu_type}, CATALOGUE)
    assert judge_published(run).verdict.verdict == "pass"


def test_sharded_rows_and_scalings_are_conditions() -> None:
    request = Request(workload="pretrain_llama3.1", size="70b", gpu_type="gb300", release="mb", dtype="fp8")
    ways = {condition.key: condition for condition in resolve(CATALOGUE, request).conditions}
    assert ways["parallelism.dp_sharding"].value == "full"
    assert "over 64 GPUs" in ways["parallelism.dp_sharding"].what
    assert ways["fp8_recipe"].value == "current"
    assert (ways["cuda_graphs"].value, ways["recompute"].value, ways.get("dispatcher")) == ("none", "none", None)
    assert ways["recompute"].source == "Megatron-Bridge v0.4.2, recipe llama3_70b for 64 gb300 in fp8"
    request = Request(workload="pretrain_deepseek-v3", size="671b", gpu_type="gb200", release="mb-25.09", dtype="fp8")
    ways = {condition.key: condition for condition in resolve(CATALOGUE, request).conditions}
    assert {key for key, way in ways.items() if way.value is None} == {"cuda_graphs", "recompute"}
    assert all(way.source == "not known: no recipe from 25.09 was read" for way in ways.values() if way.value is None)


def test_conditions_of_rows_are_those_of_their_recipes() -> None:
    known = [model_row for model_row in CATALOGUE.bridge.named if model_row[1].release != "25.09"]
    for model, row in known:
        dtype, version = CATALOGUE.bridge.file.dtypes[row.dtype], CATALOGUE.bridge.file.versions[row.release]
        recipe = CATALOGUE.script_recipes.find(version, model.recipe, row.task, row.gpu, dtype, row.gpus)
        assert recipe, "every row has its recipe"
        assert recipe.is_laid_out(row.sizes), "and its layout is that of the row"
        assert recipe.gpus == row.gpus
        assert recipe.fsdp == bool(row.fsdp) or row.fsdp is None
        assert recipe.expert_rows == ("even" if recipe.has_experts else None)
        assert recipe.dispatcher or not recipe.has_experts
    entries = [entry for _, row in known for entry in CATALOGUE.publications(PREFIX + row.release).conditions]
    unknown = {(entry.key, entry.workloads, entry.sizes) for entry in entries if entry.value is None}
    assert unknown == {
        ("cuda_graphs", ("pretrain_llama3.1",), ("405b",)),
        ("cuda_graphs", ("pretrain_llama3.1",), ("70b",)),
        ("recompute", ("pretrain_nemotron3",), ("120b",)),
    }


def test_the_script_reads_the_recipes_from_a_clone(tmp_path: Path, needs: Callable[[str, bool, str], None]) -> None:
    clone = os.environ.get(REPOSITORY, "")
    needs("bridge", bool(clone), f"{REPOSITORY} names no clone of https://github.com/NVIDIA-NeMo/Megatron-Bridge")
    reader = Path(__file__).parents[2] / "scripts" / "read_bridge_recipes.py"
    subprocess.run([sys.executable, reader, clone, tmp_path], capture_output=True, check=True)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (DATA / path.name).read_bytes(), "run scripts/read_bridge_recipes.py"


DTYPES = {"fp8-cs": "fp8_cs", "mxfp8": "fp8_mx", "nvfp4": "nvfp4", "bf16": "bf16"}
EXPERIMENTS = {(model.name, model.task): model.experiment for model in CATALOGUE.bridge.file.models}


def log_of(path: Path, row: Mapping[str, str], figure: PublishedFigure, gbs: int, factor: float) -> Path:
    """A log in Megatron-Bridge's form, whose steps take ``factor`` times as long as the row's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, 51):
        ms = 1000 * figure.expectation.step_time_s * factor * (1 + 0.002 * (step % 3 - 1))
        lines.append(
            f"ain_fp8_mx/0 Step Time : {ms / 1000:.2f}s GPU utilization: {row['tflops_per_gpu']}.0MODEL_TFLOP/s/GPU\n"
            f" [2026-08-19 10:00:00] iteration {step:8}/      50 | consumed samples: {step * gbs:12} |"
            f" elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.500000E-07 | global batch size: {gbs:5} |"
            " lm loss: 1.190000E+01 | loss scale: 1.0 | grad norm: 0.100 | number of skipped iterations:   0 |"
            " number of nan iterations:   0 |\n"
        )
    path.write_text("".join(lines))
    return path


def judged(folder: Path, row: Mapping[str, str], figure: PublishedFigure, gbs: int, factor: float) -> Verdict:
    """The verdict of such a log, in a folder with the name of its experiment."""
    sizes = "_".join(f"{name}{row[name] or None}" for name in ("tp", "pp", "cp", "vp", "ep", "mbs"))
    experiment = EXPERIMENTS[row["model"], row["task"]]
    name = f"{experiment}_{DTYPES[row['dtype']]}_gpus{row['gpus']}_{sizes}_gbs{gbs}"
    path = log_of(folder / name / "log.out", row, figure, gbs, factor)
    (run,) = with_stated([parsed_run(path, "35-44")], {"gpu_type": row["gpu"]}, CATALOGUE)
    return judge_published(run).verdict


LOGGED = [
    next(
        number
        for number, row in enumerate(ROWS)
        if (row["release"], row["gpu"], row["model"], row["dtype"]) == (release, gpu_type, model, dtype)
    )
    for release, gpu_type, model, dtype in (
        ("26.08", "gb300", "Qwen3_30B_a3B", "mxfp8"),
        ("26.08", "gb200", "DeepSeekV3", "mxfp8"),
        ("26.08", "gb300", "GPT OSS 120B", "mxfp8"),
        ("26.06", "gb300", "LLAMA3.1_405B", "nvfp4"),
        ("26.08", "gb200", "Nemotron_3_Super", "nvfp4"),
        ("26.08", "gb300", "DeepSeekV4 Flash", "mxfp8"),
        ("26.06", "gb300", "Kimi_K2", "mxfp8"),
        ("26.06", "h100", "Nemotron_3_Nano", "fp8-cs"),
        ("26.06", "h100", "LLAMA3_70B", "fp8-cs"),
        ("26.08", "gb300", "Nemotron_3_Ultra", "mxfp8"),
    )
]


@pytest.mark.parametrize("number", LOGGED, ids=lambda number: f"{ROWS[number]['model']}-{ROWS[number]['dtype']}")
def test_a_log_is_judged_by_its_row(tmp_path: Path, number: int) -> None:
    row, figure = ROWS[number], FIGURES[number]
    gbs = int(row["gbs"])
    verdict = judged(tmp_path / "same", row, figure, gbs, 1.0)
    assert (verdict.verdict, verdict.reference and verdict.reference.step_time_s) == (
        "pass", figure.expectation.step_time_s,
    ), verdict.sentence  # fmt: skip
    assert verdict.reference is not None
    assert verdict.reference.source.endswith(f"line {row['line']}")
    assert judged(tmp_path / "slow", row, figure, gbs, 1.2).verdict == "regressed"
    half = judged(tmp_path / "half", row, figure, gbs // 2, 0.5)
    assert half.verdict == "not comparable"
    assert f"{gbs // 2}, but {gbs} in the recipe" in (half.reason or "")
