# SPDX-License-Identifier: Apache-2.0
"""Which cases the engine comparison runs, in which order, and what they are expected to need."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.engine import memory
from benchmarks.engine.budget import Estimates, over_budget
from benchmarks.engine.cases import GPU_MODELS, TINY_MODELS, Case, find_subject
from benchmarks.engine.compare import find_cases
from benchmarks.engine.engines.registry import ENGINES
from benchmarks.engine.groups import load_plan
from benchmarks.engine.machine import gpu_state, in_use, memory_bytes
from benchmarks.engine.options import read_options
from benchmarks.engine.run_case import ALLOCATOR, blank, llmb_command, variables
from benchmarks.engine.session import why_not
from engine_comparison import CATALOGUE, H200, SETTINGS, subject

from llmb.catalogue.records import Dtype
from llmb.cli.main import app, exit_code_of
from llmb.metrics.model_counts import model_flops, parameter_count
from llmb.site.machine import Machine

ROOT = Path(__file__).resolve().parents[2]


def planned(*arguments, gpu_type="h200"):
    options = read_options(["--plan", "--gpu-type", gpu_type, *arguments], has_gpu=False)
    return find_cases(options, H200, CATALOGUE)


def test_engines_take_turns() -> None:
    order = [(case.subject.label, case.engine) for case in planned("--groups", "others", "--models", "15b,70b")]
    assert order[:4] == [
        ("15b bf16", "llmb"), ("15b bf16", "huggingface"), ("15b fp8", "llmb"), ("15b fp8", "huggingface"),
    ]  # fmt: skip
    assert [label for label, _ in order[4:]] == ["70b bf16"] * 2 + ["70b fp8"] * 2


def test_cases_are_in_order_of_worth() -> None:
    cases = planned()
    order = list(dict.fromkeys(case.group for case in cases))
    assert order[:3] == ["first", "large-targets", "first-again"]
    first = [(case.engine, case.subject.label, case.subject.recipe.layout.ga) for case in cases[:4]]
    assert first == [
        ("llmb", "8b bf16", 4), ("huggingface", "8b bf16", 4), ("llmb", "8b fp8", 4), ("huggingface", "8b fp8", 4),
    ]  # fmt: skip
    assert order.index("torchtitan") > order.index("others-again")
    variants = [case.variant for case in cases]
    count = sum(variant is not None for variant in variants)
    assert count and all(variants[-count:]), "what is tried comes after everything that is compared"


def test_targets_have_more_micro_batches_than_comparisons() -> None:
    """And every model with a published figure has a target case in both dtypes."""
    cases = planned()
    targets = {case.subject.label for case in cases if case.subject.recipe.layout.ga == 16}
    assert targets == {f"{name} {dtype}" for name in ("8b", "15b", "70b", "405b", "340b") for dtype in ("bf16", "fp8")}
    against = [case for case in cases if case.engine == "huggingface" and case.subject.name != "maverick"]
    assert {case.round for case in against} == {0, 1}
    assert {case.subject.recipe.layout.ga for case in planned("--micro-batches", "2")} == {2}


def test_no_case_is_run_twice() -> None:
    cases = planned("--micro-batches", "4")
    keys = [case.key for case in cases]
    assert len(keys) == len(set(keys)) < len(planned())


def test_a_choice_that_leaves_nothing_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        planned("--groups", "first", "--models", "70b")
    assert "nothing to compare" in capsys.readouterr().err


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


def timed(case, *, wall_s, step_s):
    return blank(case).model_copy(update={"status": "done", "wall_s": wall_s, "step_times_s": (step_s,) * 4})


def test_an_estimate_is_start_up_and_all_steps() -> None:
    """A step of 8b: 16 times as many FLOPs with 16 micro-batches as with one, at 40 % of 989 TFLOPS."""
    estimates = Estimates(SETTINGS)
    one, sixteen = (Case("llmb", subject("8b", micro_batches=count)) for count in (1, 16))
    flops = model_flops(one.subject.recipe.model, 8192, causal=False)
    assert estimates.case_s(one) == pytest.approx(90 + 6 * flops / 0.4 / 989e12)
    assert estimates.case_s(sixteen) - 90 == pytest.approx(16 * (estimates.case_s(one) - 90))


def test_compiling_takes_as_long_without_a_gpu() -> None:
    on_cpu = SETTINGS.model_copy(update={"gpu_type": "cpu", "compiled": False})
    case = Case("llmb", find_subject(CATALOGUE, "llama3.1", Dtype.BF16, Machine((), 2), gpu_type="cpu", tiny=True,
                                     micro_batches=2))  # fmt: skip
    assert Estimates(on_cpu).case_s(case) == 8
    assert Estimates(on_cpu.model_copy(update={"compiled": True})).case_s(case) == 90


def test_estimates_learn_start_up_and_speed() -> None:
    estimates = Estimates(SETTINGS)
    case, larger = Case("llmb", subject("8b")), Case("llmb", subject("8b", micro_batches=16))
    guessed = (estimates.case_s(case) - 90) / 6
    estimates.learn(case, timed(case, wall_s=50, step_s=guessed / 2))
    assert estimates.case_s(case) == pytest.approx(50)
    assert estimates.case_s(larger) == pytest.approx(50 - 3 * guessed + 4 * 3 * guessed)
    other = Case("huggingface", subject("8b"))
    assert estimates.case_s(other) == pytest.approx(90 + 6 * guessed), "another engine has its own start-up"
    estimates.learn(case, timed(case, wall_s=40, step_s=guessed / 2))
    assert estimates.case_s(case) == pytest.approx(50), "a second round finds its kernels compiled; a first may not"
    failed = timed(case, wall_s=500, step_s=guessed).model_copy(update={"status": "failed"})
    estimates.learn(case, failed)
    assert estimates.case_s(case) == pytest.approx(50)


def test_a_case_starts_only_if_it_is_expected_to_end_in_time() -> None:
    assert over_budget(100, 100) is None
    assert over_budget(101, 100.4) == "budget: 100 s left, about 101 s needed"
    estimates, case = Estimates(SETTINGS), Case("llmb", subject("8b"))
    assert estimates.limit_s(case, 1e6) == pytest.approx(2 * estimates.case_s(case) + 60)
    assert estimates.limit_s(case, 100) == 100
    on_cpu = Estimates(SETTINGS.model_copy(update={"gpu_type": "cpu"}))
    assert on_cpu.limit_s(case, 1e6) == pytest.approx(2 * on_cpu.case_s(case) + 300)


def test_what_needs_more_memory_than_the_gpu_has_is_not_started() -> None:
    case = Case("llmb", subject("405b", Dtype.FP8))
    assert not memory.obstacle(case, 150.7e9), "computed to need 138 GB"
    assert memory.obstacle(case, 85e9).startswith("memory: does not fit, needs about 12")
    assert memory.obstacle(case, None) is None
    assert why_not(case, SETTINGS, 85e9).startswith("memory: ")
    with_options = SETTINGS.model_copy(update={"llmb_options": "--recompute full"})
    assert why_not(case, with_options, 85e9) is None, "options may lower the need"


@pytest.mark.parametrize("name", GPU_MODELS)
def test_memory_counts_at_least_weights_gradients_and_optimizer(name) -> None:
    for dtype, bytes_each in ((Dtype.BF16, 16), (Dtype.FP8, 18)):
        case = Case("llmb", subject(name, dtype))
        state = bytes_each * parameter_count(case.subject.recipe.model)[0]
        assert state < memory.needed_bytes(case) < 150.7e9, "each proxy of an H200 fits it"
        assert memory.needed_bytes(Case("huggingface", case.subject)) < memory.needed_bytes(case)


@pytest.mark.parametrize(("visible", "expected"), [(None, []), ("2,3", ["--id=2"]), ("", [])])
def test_the_driver_is_asked_for_the_gpu_that_is_used(visible, expected, program, tmp_path, monkeypatch) -> None:
    program("nvidia-smi", f'echo "$@" > {tmp_path}/asked; echo "NVIDIA H200, 580, 143771 MiB, 3072 MiB"')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    state = gpu_state()
    assert (tmp_path / "asked").read_text().split()[2:] == expected
    assert memory_bytes(state) == 143771 * 2**20
    assert (in_use(state) or "").startswith("3.0 GiB of the GPU's memory are in use")


def test_what_the_driver_does_not_say_is_unknown_and_little_is_not_in_use() -> None:
    assert memory_bytes({"memory.total": "[N/A]"}) is memory_bytes(None) is None
    assert in_use({"memory.used": "512 MiB"}) is in_use({"memory.used": "[N/A]"}) is in_use(None) is None


PAGE = (ROOT / "docs" / "how-to" / "compare-engines.md").read_text()
COMMANDS = re.findall(r"^python3 -m benchmarks\.engine( .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_gives_commands_that_are_understood(command: str) -> None:
    words = shlex.split(command, comments=True)
    assert read_options(words, has_gpu=True).expandable_segments
