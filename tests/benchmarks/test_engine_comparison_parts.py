# SPDX-License-Identifier: Apache-2.0
"""What the engine comparison runs, decides and concludes, without running anything."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.engine import memory
from benchmarks.engine.cases import GPU_MODELS, TINY_MODELS, Case
from benchmarks.engine.compare import find_cases
from benchmarks.engine.engines.job import Measured
from benchmarks.engine.engines.registry import ENGINES
from benchmarks.engine.groups import load_plan
from benchmarks.engine.kernels import with_shares
from benchmarks.engine.options import read_options
from benchmarks.engine.processes import Ended
from benchmarks.engine.published import find_target
from benchmarks.engine.records import CaseResult, Ceilings, Document, Settings, Verdict
from benchmarks.engine.run_case import ALLOCATOR, blank, llmb_command, read_adapter, variables
from benchmarks.engine.shapes import Floor, floor_of, job_of, request_of
from benchmarks.engine.store import difference, open_document, with_case
from benchmarks.engine.verdicts import judge, merged
from engine_comparison import CATALOGUE, H200, SETTINGS, case_result, subject, target_of

from llmb.catalogue.records import Dtype
from llmb.catalogue.throughput import model_flops, parameter_count
from llmb.cli.main import app, exit_code_of
from llmb.nodes.bench.device_bench import weights_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "dtype", "target"),
    [
        ("8b", Dtype.BF16, (62.47, 8, "h100")),
        ("8b", Dtype.FP8, (41.07, 8, "h100")),
        ("15b", Dtype.BF16, (66.07, 16, "h100")),
        ("405b", Dtype.BF16, (55.47, 512, "h100")),
        ("405b", Dtype.FP8, (44.35, 512, "h100")),
        ("maverick", Dtype.BF16, (10.47, 256, "b200")),
        ("maverick", Dtype.FP8, None),  # no figure is published
    ],
)
def test_the_target_is_the_whole_models_at_its_smallest_published_scale(name, dtype, target) -> None:
    found = subject(name, dtype).target
    assert (found and (found.mfu_pct, found.scale, found.gpu_type)) == target


@pytest.mark.parametrize(("compiled", "option"), [(True, "--compile"), (False, "--no-compile")])
def test_llmb_compiles_only_where_the_others_do(compiled, option) -> None:
    """On a GPU it would without being asked."""
    case = Case("llmb", subject("8b"))
    command = llmb_command(case, SETTINGS.model_copy(update={"compiled": compiled}))
    assert [word for word in command if word.endswith("compile")] == [option]


@pytest.mark.parametrize("name", GPU_MODELS)
def test_products_add_up_to_the_models_flops(name) -> None:
    recipe = subject(name).recipe
    products = sum(
        3 * 2 * weights.m * weights.k * weights.n * weights.count for weights in weights_of(recipe.model, recipe.layout)
    )
    full, causal = (model_flops(recipe.model, recipe.layout.seq_len, causal=causal) for causal in (False, True))
    without_attention = 2 * causal - full
    assert products == pytest.approx(recipe.layout.mbs * without_attention, rel=1e-12)


def test_the_floor_is_what_the_products_and_attention_take() -> None:
    recipe = subject("8b", Dtype.FP8).recipe
    request = request_of([recipe], "cuda", 1)
    measured = {
        "products": [
            {**shape, "seconds": 2.0 if shape["dtype"] == "bf16" else 1.0, "reason": None}
            for shape in request["products"]
        ],
        "sustained": [{**shape, "seconds": 1.25, "reason": None} for shape in request["sustained"]],
        "attention": [
            {**shape, "backend": backend, "backward": True, "seconds": seconds}
            for shape in request["attention"]
            for backend, seconds in (("flash", 0.5), ("cudnn", 0.25))
        ],
    }
    floor = floor_of("8b", recipe, measured)
    layers = recipe.layout.layers
    assert floor.products_s == 3 * (4 * layers * 1.0 + 2.0), "three passes; the head alone stays in bf16"
    assert (floor.attention_s, floor.attention_backend) == (0.25 * layers, "cudnn")
    assert floor.sustained == 0.8, "the largest product in FP8 takes 1.25 s in a loop, 1 s alone"


def test_what_is_sustained_is_measured_for_seconds() -> None:
    recipes = [subject("8b", dtype).recipe for dtype in (Dtype.BF16, Dtype.FP8)]
    job = job_of(request_of(recipes, "cuda", 1))
    loops = [case for case in job.cases if case.sustained_s is not None]
    assert [(case.work.dtype, case.sustained_s) for case in loops] == [("bf16", 2.0), ("fp8", 2.0)]
    assert {case.work.backend for case in job.cases if case.work.kind == "attention"} >= {"cudnn", "flash"}


def test_a_product_that_cannot_be_measured_leaves_the_floor_unknown() -> None:
    recipe = subject("8b").recipe
    request = request_of([recipe], "cuda", 1)
    products = [{**shape, "seconds": None, "reason": "no such kernel"} for shape in request["products"]]
    floor = floor_of("8b", recipe, {"products": products, "attention": [], "sustained": []})
    assert floor.products_s is None and "no such kernel" in floor.reason
    assert with_shares(case_result(), Ceilings(measured=None, floors=(floor,))).kernel_share_pct is None


def test_shares_set_a_step_against_the_kernels() -> None:
    floor = Floor(name="8b", dtype=Dtype.BF16, products_s=0.15, products_tflops=800.0, sustained=0.75,
                  attention_s=0.05, attention_backend="cudnn", reason=None)  # fmt: skip
    case = case_result(times=(0.9, 1.0, 1.1)).model_copy(update={"tflops": {"causal": 600.0}})
    found = with_shares(case, Ceilings(measured=None, floors=(floor,)))
    assert found.kernel_share_pct == pytest.approx(80), "4 micro-batches of 0.2 s in a step of 1 s"
    assert found.product_share_pct == pytest.approx(75)
    assert found.sustained_share_pct == pytest.approx(100), "products take 0.2 s at three quarters of their rate"


def test_an_engine_whose_loss_is_not_finite_has_failed(tmp_path) -> None:
    """JSON has no such number: a result that is done could not be read again."""
    case = Case("huggingface", subject("8b"))
    parameters = blank(case).parameters
    measured = Measured(
        parameters=parameters, step_times_s=(1.0,) * 2, losses=(11.0, float("nan")), peak_memory_bytes=1, versions={},
        conventions=(),
    )  # fmt: skip
    (tmp_path / "result.json").write_text(measured.model_dump_json())
    found = read_adapter(case, blank(case), Ended(0, "", "", 1.0), tmp_path)
    assert (found.status, found.reason) == ("failed", "the loss of step 1 is not finite")


def test_the_page_has_the_published_figure_beside_each_measured_one() -> None:
    page = (ROOT / "docs" / "explanation" / "engine-speed.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (bf16|fp8) \| \d+ (?:\| [\d.,]+ ){3}\| ([\d.]+) \|", page, re.MULTILINE)
    targets = [find_target(CATALOGUE, *GPU_MODELS[name], Dtype(dtype)) for name, dtype, _ in rows]
    assert [f"{target and target.mfu_pct:.1f}" for target in targets] == [published for *_, published in rows] != []


def test_the_page_names_every_key_of_the_document() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for record in (Document, CaseResult, Settings, Verdict, Floor, Ceilings):
        missing = [name for name in record.model_fields if f"`{name}`" not in page]
        assert not missing, record.__name__


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


PAGE = (ROOT / "benchmarks" / "README.md").read_text()
COMMANDS = re.findall(r"^python3 -m benchmarks\.engine( .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_gives_commands_that_are_understood(command: str) -> None:
    words = shlex.split(command, comments=True)
    assert read_options(words, has_gpu=True).expandable_segments


def test_published_figure_is_reached_from_its_value_on() -> None:
    for mfu, verdict in ((50.1, "not_reached"), (50.0, "reached"), (49.0, "reached")):
        (own,) = judge([case_result(mfu=50.0)], [target_of(mfu)])
        assert (own.verdict, own.measured, own.target) == (verdict, 50.0, mfu)


def test_another_engine_has_to_be_beaten() -> None:
    for tokens_per_s, verdict in ((99.0, "reached"), (100.0, "not_reached"), (200.0, "not_reached")):
        cases = [case_result(), case_result("huggingface", tokens_per_s=tokens_per_s)]
        (_, other) = judge(cases, [target_of(60)])
        assert (other.against, other.verdict) == ("tokens/s of huggingface", verdict)
        assert other.margin_pct == pytest.approx(100 * (100.0 / tokens_per_s - 1))


def test_what_did_not_run_is_not_judged() -> None:
    cases = [case_result(), case_result("huggingface", status="not_run"), case_result(dtype="fp8", status="failed")]
    found = {(verdict.dtype, verdict.shows): verdict for verdict in judge(cases, [target_of(40)])}
    assert found["bf16", "other_engine"].reason == "huggingface not run: boom"
    assert found["fp8", "published_mfu"].verdict == "not_measured"
    assert found["bf16", "published_mfu"].verdict == "reached"


def test_the_middle_round_counts() -> None:
    rounds = [case_result(times=(time_s,), number=number) for number, time_s in enumerate((3.0, 1.0, 2.0))]
    failed = case_result(status="failed", number=3)
    assert [case.step_times_s for case in merged([*rounds, failed])] == [(2.0,)]


def test_the_most_micro_batches_count_for_the_published_figure() -> None:
    """And the same number as the other engine's for the comparison with it."""
    many = case_result(mfu=60.0, tokens_per_s=110.0).model_copy(update={"ga": 16})
    own, other = judge([case_result(), many, case_result("huggingface", tokens_per_s=105.0)], [target_of(55)])
    assert (own.verdict, own.measured, own.micro_batches) == ("reached", 60.0, 16)
    assert (other.verdict, other.measured, other.micro_batches) == ("not_reached", 100.0, 4)
    failed = many.model_copy(update={"status": "failed", "mfu_pct": None})
    own, *_ = judge([case_result(), failed], [target_of(55)])
    assert (own.verdict, own.micro_batches) == ("not_reached", 4)


def test_a_verdict_says_how_far_rounds_differ() -> None:
    other = [case_result("huggingface", times=(time_s,), number=number) for number, time_s in enumerate((1.0, 1.03))]
    _, verdict = judge([case_result(times=(1.0,)), case_result(times=(1.01,), number=1), *other], [])
    assert verdict.rounds_differ_pct == pytest.approx(3)
    _, verdict = judge([case_result(), other[0]], [])
    assert verdict.rounds_differ_pct is None


def test_variants_are_shown_but_not_judged() -> None:
    variant = case_result(mfu=99.0, tokens_per_s=999.0).model_copy(update={"variant": "profile"})
    (own,) = judge([variant, case_result(mfu=50.0)], [target_of(60)])
    assert own.measured == 50.0


def test_results_of_other_code_are_named_and_not_judged() -> None:
    document = open_document(None, SETTINGS, fresh=True)
    old = case_result().model_copy(update={"code": "before"})
    document = document.model_copy(update={"cases": (old,)})
    wanted = case_result(status="not_run").model_copy(update={"reason": "budget: 1 s left", "code": "after"})
    assert difference(old, wanted) == "code before -> after"
    (kept,) = with_case(document, wanted).cases
    assert (kept.status, kept.tokens_per_s, kept.code) == ("done", old.tokens_per_s, "before")
    assert kept.outdated == "code before -> after; not measured again: budget: 1 s left"
    (own,) = judge([kept], [target_of(40)])
    assert own.verdict == "not_measured" and "outdated" in own.reason
    (new,) = with_case(document, case_result(tokens_per_s=7.0)).cases
    assert new.tokens_per_s == 7.0
