# SPDX-License-Identifier: Apache-2.0
"""A catalogue of one's own beside that of the package: what it adds, and what each wrong file ends in."""

import json
from pathlib import Path

import pytest
import yaml
from called_here import Run

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import DATA, Catalogue, user_folder

MODEL = """\
model: mine
source: me
common: {norm: rmsnorm, mlp: swiglu, vocab_size: 1024, max_seq_len: 256,
  norm_eps: 1.0e-6, rope_theta: 10000, init_std: 0.02}
sizes:
  small: {layers: 4, hidden_size: 128, ffn_hidden_size: 448, attention_heads: 8, kv_heads: 4, head_dim: 16}
"""
WORKLOAD = """\
workload: pretrain_mine
title: mine
task: pretrain
model: mine
training:
  common: {peak_lr: 3.0e-4, min_lr: 3.0e-5, warmup_steps: 10, decay_steps: 100, beta1: 0.9, beta2: 0.95, eps: 1.0e-8,
           weight_decay: 0.1, clip_grad: 1.0, data: uniform}
published_flops: []
checkpoints: {}
jobs: {time_limits: [{minutes: 30, source: me}]}
layouts:
  - {size: small, gpu_types: [mine], dtypes: [bf16], seq_len: 128, above_largest: double,
     release: "26.11", document: mine-26.11, rows: [{gpus: 8, layers: 4, mbs: 1, gbs: 64}]}
"""
HARDWARE = """\
- gpu_type: mine
  name: A GPU of mine
  peak_tflops: {bf16: 500}
  memory_gb: 80
  memory_bandwidth_tb_s: 2
  nvlink_gb_s: 600
  nvlink_domain_gpus: 8
  gpus_per_node: 8
  device_names: ["Mine*"]
  sources: {peak_tflops: me, memory_gb: me, memory_bandwidth_tb_s: me, nvlink_gb_s: me}
"""
DOCUMENTS = """\
- {document: mine-26.11, title: My figures, source: a wiki page, release: "26.11", window: null, convention: causal,
   framework: mine, window_reason: the page does not state them}
"""
FIGURES = """\
document: mine-26.11
workload: pretrain_mine
tables:
  - {size: small, dtype: bf16, gpu_type: mine, lines: {step_time_s: 3}, peak_tflops: 500,
     rows: [{gpus: 8, step_time_s: 1.5, tokens_per_s: 5461, mfu_pct: 1, days_per_1t_tokens: 2119}]}
"""
FILES = {
    "models/mine.yaml": MODEL,
    "workloads/pretrain_mine.yaml": WORKLOAD,
    "hardware.yaml": HARDWARE,
    "documents.yaml": DOCUMENTS,
    "expectations/mine-26.11.yaml": FIGURES,
}
MINE = ("show", "pretrain_mine", "small")
OTHER = ("show", "pretrain_llama3.1", "8b", "--gpu-type", "h100")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setenv("LLMB_CATALOGUE", str(folder))
    return folder


def test_recipes_models_gpus_and_figures_of_ones_own_are_used(llmb: Run, own: Path) -> None:
    document = json.loads(llmb(*MINE, "--json").stdout)
    assert document["expectations"][0]["step_time_s"] == 1.5
    assert document["recipe"]["gpu_type"] == "mine"
    assert "pretrain_mine" in llmb("list").stdout
    predicted = llmb("predict", *MINE[1:]).stdout
    assert "published s" in predicted and "GPU figures from a file" in predicted
    checked = json.loads(llmb("config", "check", "--json").stdout)
    assert checked["catalogue"]["path"] == str(own)
    assert [one["file"] for one in checked["catalogue"]["files"]] == [
        *("hardware.yaml", "documents.yaml", "models/mine.yaml", "workloads/pretrain_mine.yaml"),
        "expectations/mine-26.11.yaml",
    ]
    assert checked["path"] is None
    assert not any(one["problems"] for one in checked["catalogue"]["files"])


def change(own: Path, name: str, before: str, after: str) -> Path:
    text = (own / name).read_text()
    assert before in text
    (own / name).write_text(text.replace(before, after))
    return own / name


WRONG = [
    ("models/mine.yaml", "norm: rmsnorm", "nrm: rmsnorm", ":6: sizes.small.nrm: unknown key; valid: model, size, norm"),
    ("models/mine.yaml", "mlp: swiglu", "mlp: gelu", "mlp: Input should be 'swiglu' or 'squared-relu'"),
    ("workloads/pretrain_mine.yaml", "above_largest", "above", "layouts.0.above: unknown key; valid: size, model_size"),
    ("workloads/pretrain_mine.yaml", "mbs: 1, gbs: 64", "mbs: 1, gbs: 63", "GBS 63 is not divisible by MBS x DP"),
    ("models/mine.yaml", "layers: 4", "layers: yes", "sizes.small.layers: it must be a number"),
    ("expectations/mine-26.11.yaml", "s: 1.5", "s: .nan", "rows.0.step_time_s: Input should be less"),
    ("expectations/mine-26.11.yaml", "s: 1.5", "s: -1.5", "rows.0.step_time_s: Input should be greater than 0"),
    ("expectations/mine-26.11.yaml", "s: 1.5", "s: true", "rows.0.step_time_s: it must be a number"),
    ("workloads/pretrain_mine.yaml", "model: mine", "model: yours", "there is no model 'yours'"),
    ("workloads/pretrain_mine.yaml", "title: mine", "title: [", "not valid YAML"),
    (
        "workloads/pretrain_mine.yaml",
        "title: mine",
        "title: !!python/object:os.system x",
        "a tag, which is unsupported",
    ),
]


@pytest.mark.parametrize(("name", "before", "after", "said"), WRONG)
def test_a_wrong_file_ends_the_commands_that_need_it_and_no_others(
    llmb: Run, own: Path, name: str, before: str, after: str, said: str
) -> None:
    path = change(own, name, before, after)
    failed = llmb(*MINE, code=2)
    assert str(path) in failed.stderr
    assert said in failed.stderr
    llmb(*OTHER, code=0)
    checked = llmb("config", "check", code=2)
    assert said in checked.stderr
    assert "problem" in checked.stdout


def test_kv_heads_divide_attention_heads(llmb: Run, own: Path) -> None:
    change(own, "models/mine.yaml", "kv_heads: 4", "kv_heads: 3")
    assert "attention heads 8 is not divisible by 3 KV heads" in llmb(*MINE, code=2).stderr


@pytest.mark.parametrize(
    ("before", "after"), [("step_time_s: 1.5", "step_time_s: 1500"), ("s: 5461", "s: 683"), ("s: 2119", "s: 21")]
)
def test_figures_that_contradict_each_other_are_not_used(llmb: Run, own: Path, before: str, after: str) -> None:
    change(own, "expectations/mine-26.11.yaml", before, after)
    assert "the published figures contradict each other" in llmb(*MINE).stdout


NAMES = [
    ("models/mine.yaml", "models/qwen3.yaml", ("mine", "qwen3"), "models/qwen3.yaml"),
    (
        "workloads/pretrain_mine.yaml",
        "workloads/pretrain_qwen3.yaml",
        ("_mine", "_qwen3"),
        "workloads/pretrain_qwen3.yaml",
    ),
    ("hardware.yaml", "hardware.yaml", ("gpu_type: mine", "gpu_type: h100"), "hardware.yaml"),
    ("documents.yaml", "documents.yaml", ("mine-26.11", "llama3.1-25.04"), "documents.yaml"),
]


@pytest.mark.parametrize(("name", "renamed", "words", "theirs"), NAMES)
def test_a_name_that_the_package_has_is_an_error_with_both_places(
    llmb: Run, own: Path, name: str, renamed: str, words: tuple[str, str], theirs: str
) -> None:
    change(own, name, *words).rename(own / renamed)
    checked = llmb("config", "check", code=2)
    assert str(own / renamed) in checked.stderr
    assert f", in {DATA / theirs}: rename one of them" in checked.stderr


def test_a_name_of_models_from_files_is_taken(llmb: Run, own: Path) -> None:
    change(own, "models/mine.yaml", "model: mine", "model: custom").rename(own / "models" / "custom.yaml")
    assert "is the name of a model that --model-config describes" in llmb("config", "check", code=2).stderr


def test_files_that_nothing_reads_and_figures_without_a_recipe_are_problems(llmb: Run, own: Path) -> None:
    for name in ("model.yaml", "models/mine.json", "models/more/mine.yaml", ".git/config", "README.md"):
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_text("{}")
    change(own, "expectations/mine-26.11.yaml", "workload: pretrain_mine", "workload: pretrain_yours")
    said = llmb("config", "check", code=2).stderr
    assert "5 problems in files" in said
    assert "there is no recipe pretrain_yours small for its figures" in said
    assert "valid: hardware.yaml, documents.yaml, models/NAME.yaml, workloads/NAME.yaml" in said
    llmb(*MINE, code=0)


def test_the_folder_is_that_of_the_variable_or_of_the_user(tmp_path: Path) -> None:
    folder = tmp_path / "llmb" / "catalogue"
    assert user_folder({"XDG_CONFIG_HOME": str(tmp_path)}) is None
    folder.mkdir(parents=True)
    assert user_folder({"XDG_CONFIG_HOME": str(tmp_path)}) == folder
    assert user_folder({"XDG_CONFIG_HOME": str(tmp_path), "LLMB_CATALOGUE": str(tmp_path)}) == tmp_path
    assert user_folder({"LLMB_CATALOGUE": " "}) is None
    with pytest.raises(UsageError, match="LLMB_CATALOGUE does not name a folder"):
        user_folder({"LLMB_CATALOGUE": str(tmp_path / "missing")})


def test_a_catalogue_elsewhere_ignores_it(own: Path, tmp_path: Path) -> None:
    assert Catalogue().folder == own
    assert Catalogue(tmp_path).folder is None
    assert yaml.safe_load(HARDWARE)[0]["gpu_type"] in Catalogue().gpus
