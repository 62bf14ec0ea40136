# SPDX-License-Identifier: Apache-2.0
"""What the engine comparison decides without running anything."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.engine.budget import Clock
from benchmarks.engine.cases import GPU_MODELS, Case
from benchmarks.engine.compare import targets
from benchmarks.engine.engines.job import Measured
from benchmarks.engine.kernels import with_shares
from benchmarks.engine.options import read_options
from benchmarks.engine.processes import Ended, failure_reason, run_limited
from benchmarks.engine.published import find_target
from benchmarks.engine.records import CaseResult, Ceilings, Document, Settings, Verdict
from benchmarks.engine.run_case import blank, llmb_command, read_adapter, read_llmb
from benchmarks.engine.session import Session
from benchmarks.engine.shapes import Floor, floor_of, job_of, request_of
from benchmarks.engine.store import locked, open_document, save
from engine_comparison import CATALOGUE, SETTINGS, case_result, subject

from llmb.bench.cases import weights_of
from llmb.catalogue.records import Dtype
from llmb.errors import UsageError
from llmb.metrics.model_counts import model_flops
from llmb.runs.parent_death import has_ended

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


@pytest.mark.parametrize("name", GPU_MODELS)
def test_proxies_are_the_catalogues_with_as_many_micro_batches_as_asked_for(name) -> None:
    own, asked = subject(name, micro_batches=None).recipe, subject(name, micro_batches=3).recipe
    assert asked.model == own.model
    assert asked.layout.ga == 3
    assert own.proxy and own.scale == 1
    assert asked.gpu_type == "h200"


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


def test_results_of_other_settings_are_not_mixed(tmp_path) -> None:
    path = tmp_path / "out.json"
    path.write_text(open_document(None, SETTINGS, fresh=False).model_dump_json())
    assert open_document(path, SETTINGS, fresh=False).settings == SETTINGS
    earlier, new = path, tmp_path / "new.json"
    assert open_document(new, SETTINGS, fresh=False, earlier=earlier).settings == SETTINGS
    with pytest.raises(UsageError, match="does not exist"):
        open_document(new, SETTINGS, fresh=False, earlier=tmp_path / "missing.json")
    other = SETTINGS.model_copy(update={"steps": 9})
    with pytest.raises(UsageError, match="steps 4 -> 9"):
        open_document(new, other, fresh=False, earlier=earlier)
    with pytest.raises(UsageError, match="steps 4 -> 9"):
        open_document(path, other, fresh=False)
    assert open_document(path, other, fresh=True).settings == other
    for content in (b"{}", b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="not a comparison"):
            open_document(path, SETTINGS, fresh=False)
    with pytest.raises(UsageError, match="it is a directory"):
        open_document(tmp_path, SETTINGS, fresh=False)


def test_a_place_that_cannot_be_written_is_known_before_anything_is_measured(tmp_path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out.json"
    with pytest.raises(UsageError) as refused, locked(out):
        pass
    assert (refused.value.where, refused.value.do) == (str(out), "specify another --out")
    with pytest.raises(UsageError, match="cannot be written"):
        save(open_document(None, SETTINGS, fresh=True), out)


def test_two_calls_do_not_write_the_same_document(tmp_path) -> None:
    path = tmp_path / "out.json"
    with locked(path), pytest.raises(UsageError, match="another process"), locked(path):
        pass
    with locked(path), locked(tmp_path / "other.json"), locked(None):
        pass


def test_a_full_disk_does_not_end_a_session(tmp_path, capsys) -> None:
    """What was measured is printed in the end."""
    (tmp_path / "file").touch()
    document = open_document(None, SETTINGS, fresh=True)
    session = Session(document, tmp_path / "file" / "out.json", tmp_path, Clock(0.0, time.monotonic()), None)
    session.run([Case("llmb", subject("8b"))], ceilings=False)
    assert [case.status for case in session.document.cases] == ["not_run"]
    assert "not saved: cannot be written" in capsys.readouterr().err


def test_what_failed_is_forgotten_only_when_it_is_run_again(tmp_path) -> None:
    """Here there is no time left for that."""
    case = Case("llmb", subject("8b"))
    failed = blank(case).model_copy(update={"status": "failed", "reason": "out of memory", "log_tail": "why"})
    document = open_document(None, SETTINGS, fresh=True).model_copy(update={"cases": (failed,)})
    session = Session(document, None, tmp_path, Clock(0.0, time.monotonic()), None, retry_failed=True)
    session.run([case], ceilings=False)
    (found,) = session.document.cases
    assert (found.status, found.reason, found.log_tail) == ("failed", "out of memory", "why")


@pytest.mark.parametrize(
    "words",
    [
        ("--minutes", "nan"),
        ("--minutes", "inf"),
        ("--minutes", "0"),
        ("--minutes=-1",),
        ("--llmb-options", "--recompute 'full"),
        ("--gpu-type", "h200"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(words, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(words, has_gpu=False)
    assert ended.value.code == 2
    assert words[0].partition("=")[0] in capsys.readouterr().err


def test_a_command_that_is_refused_says_why_in_a_line() -> None:
    error = {"what": "this layout is invalid:\n - 1 is not divisible by 2", "where": None, "do": "change it"}
    stderr = f"llmb: root of installation: /tmp\n{json.dumps({'error': error})}\n"
    found = read_llmb(Case("llmb", subject("8b")), case_result(status="not_run"), Ended(2, "", stderr, 1.0), Path())
    assert (found.status, found.reason) == ("not_run", "this layout is invalid: - 1 is not divisible by 2; change it")
    found = read_llmb(
        Case("llmb", subject("8b")), case_result(status="not_run"), Ended(3, "", "no  torch\n", 1.0), Path()
    )
    assert found.reason == "no torch"


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


def test_a_second_call_for_other_models_keeps_the_targets_of_the_first() -> None:
    first = open_document(None, SETTINGS, fresh=True)
    first = first.model_copy(update={"published": targets(first, [subject("8b")])})
    assert [found.model for found in targets(first, [subject("15b"), subject("maverick", Dtype.FP8)])] == ["8b", "15b"]


def test_without_a_gpu_models_are_tiny(capsys) -> None:
    options = read_options([], has_gpu=False)
    assert (options.tiny, options.gpu_type, options.compiled) == (True, "cpu", False)
    assert read_options([], has_gpu=True).groups[0].models == ("8b",)
    with pytest.raises(SystemExit):
        read_options(["--models", "9b"], has_gpu=True)
    assert "unknown 9b; valid: 8b" in capsys.readouterr().err


def test_a_process_over_its_limit_is_ended(tmp_path, monkeypatch) -> None:
    written = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(written)!r}).write_text(str(os.getpid())); time.sleep(600)"

    class Started(subprocess.Popen):
        """Its limit begins when it sleeps, however long Python takes to start."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            while not (written.exists() and written.read_text()):
                assert self.poll() is None
                time.sleep(0.02)

    monkeypatch.setattr(subprocess, "Popen", Started)
    ended = run_limited([sys.executable, "-c", code], os.environ, tmp_path / "log.txt", 0.5)
    assert ended.exit_code is None
    assert ended.wall_s < 300
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)


def test_a_process_ends_with_a_comparison_that_is_killed(tmp_path) -> None:
    """It would keep the GPU's memory from the next one."""
    child = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    parent = (
        "import os, pathlib, sys; from benchmarks.engine.processes import run_limited;"
        f"run_limited([sys.executable, '-c', {child!r}], os.environ, pathlib.Path('log.txt'), 600)"
    )
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
    written = tmp_path / "pid"
    while not (written.exists() and written.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while not has_ended(int(written.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_reason_of_a_failure_is_the_error_that_was_named(tmp_path) -> None:
    def reason(code):
        return failure_reason(run_limited([sys.executable, "-c", code], os.environ, tmp_path / "log.txt", 60))

    assert reason("raise ValueError('no such layer')") == "ValueError: no such layer"
    memory = "class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('tried to get 9 GiB')"
    assert reason(memory).startswith("out of memory: ")
    assert reason("import sys; sys.exit(7)") == "ended with exit code 7"
    assert reason(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})") == "killed by signal 9"


def test_the_page_lists_the_targets() -> None:
    """docs/explanation/engine-speed.md prints what is to be reached."""
    page = (ROOT / "docs" / "explanation" / "engine-speed.md").read_text()
    for name, (workload, size) in GPU_MODELS.items():
        for dtype in (Dtype.BF16, Dtype.FP8):
            found = find_target(CATALOGUE, workload, size, dtype)
            row = f"| {name} | {dtype} | n/a | n/a | n/a | n/a | not published |"
            if found:
                recounted = f"{found.mfu_pct_full:.2f} | {found.mfu_pct_causal:.2f}"
                source = f"{found.source.split(' (')[0]} line {found.line}"
                where = f"{found.scale} x {found.gpu_type}"
                row = f"| {name} | {dtype} | {found.mfu_pct} | {recounted} | {where} | {source} |"
            assert row in page


def test_the_page_names_every_key_of_the_document() -> None:
    page = (ROOT / "docs" / "how-to" / "compare-engines.md").read_text()
    for record in (Document, CaseResult, Settings, Verdict, Floor, Ceilings):
        missing = [name for name in record.model_fields if f"`{name}`" not in page]
        assert not missing, record.__name__
