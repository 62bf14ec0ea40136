# SPDX-License-Identifier: Apache-2.0
"""Which cases the engine comparison runs, in which order, and what they are expected to need."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.engine import memory
from benchmarks.engine.cases import GPU_MODELS, TINY_MODELS, Case
from benchmarks.engine.compare import find_cases
from benchmarks.engine.engines.registry import ENGINES
from benchmarks.engine.groups import load_plan
from benchmarks.engine.options import read_options
from benchmarks.engine.run_case import ALLOCATOR, llmb_command, variables
from engine_comparison import CATALOGUE, H200, SETTINGS, subject

from llmb.catalogue.records import Dtype
from llmb.cli.main import app, exit_code_of
from llmb.metrics.throughput import parameter_count

ROOT = Path(__file__).resolve().parents[2]


def planned(*arguments, gpu_type="h200"):
    options = read_options(["--plan", "--gpu-type", gpu_type, *arguments], has_gpu=False)
    return find_cases(options, H200, CATALOGUE)


def test_targets_have_more_micro_batches_than_comparisons() -> None:
    """And every model with a published figure has a target case in both dtypes."""
    cases = planned()
    targets = {case.subject.label for case in cases if case.subject.recipe.layout.ga == 16}
    assert targets == {f"{name} {dtype}" for name in ("8b", "15b", "70b", "405b", "340b") for dtype in ("bf16", "fp8")}
    against = [case for case in cases if case.engine == "huggingface" and case.subject.name != "maverick"]
    assert {case.round for case in against} == {0, 1}
    assert {case.subject.recipe.layout.ga for case in planned("--micro-batches", "2")} == {2}


@pytest.mark.parametrize("tiny", [False, True])
def test_the_plan_names_only_what_there_is(tiny) -> None:
    plan = load_plan()
    for group in plan.groups(tiny=tiny):
        assert set(group.models) <= set(TINY_MODELS if tiny else GPU_MODELS), group.name
        assert set(group.engines) <= set(ENGINES), group.name
        assert group.variant is None or group.variant in plan.variants
        assert group.variant is None or group.engines == ("llmb",)


def test_llmb_knows_the_options_of_variants(capsys) -> None:
    """Without them, a variant would be the default under another name."""
    for name in load_plan().variants:
        (case,) = planned("--groups", name)
        _, _, module, *words = llmb_command(case, SETTINGS)
        assert module == "llmb.cli.main"
        assert exit_code_of(app, [*words, "--dry-run"]) == 0, capsys.readouterr().err


def test_a_profile_comes_after_the_timed_steps() -> None:
    (case,) = planned("--groups", "profile")
    command = llmb_command(case, SETTINGS)
    words = dict(pairwise(command))
    assert (words["--steps"], words["--window"]) == ("8", "2-5")
    assert (words["--profile-start-step"], words["--profile-stop-step"]) == ("6", "8")


def test_all_engines_get_the_same_variables(monkeypatch) -> None:
    for name in (*ALLOCATOR, "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    cases = [Case(engine, subject("8b")) for engine in ("llmb", "huggingface")]
    given, other = (variables(case, SETTINGS) for case in cases)
    assert given == other
    assert given["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
    expandable = SETTINGS.model_copy(update={"expandable_segments": True})
    assert variables(cases[0], expandable)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    on_cpu = SETTINGS.model_copy(update={"gpu_type": "cpu"})
    assert "GOMP_SPINCOUNT" in variables(cases[1], on_cpu), "a CPU's threads wait alike"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_ALLOC_CONF" not in variables(cases[0], SETTINGS), "what the user has set stays"
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert "GOMP_SPINCOUNT" not in variables(cases[0], on_cpu)


@pytest.mark.parametrize("name", GPU_MODELS)
def test_memory_counts_at_least_weights_gradients_and_optimizer(name) -> None:
    for dtype, bytes_each in ((Dtype.BF16, 16), (Dtype.FP8, 18)):
        case = Case("llmb", subject(name, dtype))
        state = bytes_each * parameter_count(case.subject.recipe.model)[0]
        assert state < memory.needed_bytes(case) < 150.7e9, "each proxy of an H200 fits it"
        assert memory.needed_bytes(Case("huggingface", case.subject)) < memory.needed_bytes(case)


PAGE = (ROOT / "docs" / "how-to" / "compare-engines.md").read_text()
COMMANDS = re.findall(r"^python3 -m benchmarks\.engine( .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_gives_commands_that_are_understood(command: str) -> None:
    words = shlex.split(command, comments=True)
    assert read_options(words, has_gpu=True).expandable_segments
