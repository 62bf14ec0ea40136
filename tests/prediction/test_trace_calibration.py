# SPDX-License-Identifier: Apache-2.0
"""Kernels of a trace replace the terms that they are; a trace of something else is refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.prediction.prediction import Prediction, default_calibration, predict
from llmb.prediction.trace_calibration import calibrate_with_trace
from llmb.readers.profiles.breakdown import summarize
from llmb.readers.profiles.trace_files import read_traces
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan

CATALOGUE = Catalogue()
H100 = CATALOGUE.gpus["h100"]
USUAL = default_calibration(CATALOGUE.rates)
S = 1e6
"""Microseconds of a trace."""
KERNELS = {
    "nvjet_hsh_256x128": 11.0,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": 0.8,
    "void at::native::vectorized_elementwise_kernel<4>": 0.9,
    "ncclDevKernel_AllGather_RING_LL": 0.5,
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": 0.25,
    "ncclDevKernel_SendRecv": 0.75,
}


def planned(scale: int = 64, **sizes: int) -> EnginePlan:
    overrides = Overrides(**sizes)
    asked = Request(workload="pretrain_llama3.1", size="70b", gpu_type="h100", scale=scale, overrides=overrides)
    return make_plan(resolve(CATALOGUE, asked), Choices(), device="cuda")


def trace(path: Path, kernels: Mapping[str, float], gpu: str = "NVIDIA H100 80GB HBM3", ranks: int = 64) -> Path:
    """A step in which kernels run one after another."""
    events, now = [], 0.0
    for name, seconds in kernels.items():
        events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": now, "dur": seconds * S})
        now += seconds * S
    marked = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#9", "pid": 1, "tid": 1, "ts": 0.0, "dur": now}
    world = {"backend": "nccl", "rank": 0, "world_size": ranks}
    header = {"deviceProperties": [{"id": 0, "name": gpu}], "distributedInfo": world}
    path.write_text(json.dumps({**header, "traceEvents": [marked, *events]}))
    return path


def calibrated(path: Path, plan: EnginePlan, recorded: EnginePlan | None = None) -> Prediction:
    found = calibrate_with_trace(summarize(read_traces([path])), recorded, plan, CATALOGUE.gpus.values(), H100, USUAL)
    return predict(plan, H100, found, CATALOGUE.rates.errors)


def test_measured_kernels_replace_their_terms_and_the_rest_stays(tmp_path: Path) -> None:
    plan = planned()
    usual, found = (
        predict(plan, H100, USUAL, CATALOGUE.rates.errors),
        calibrated(trace(tmp_path / "a.json", KERNELS), plan),
    )
    terms = found.terms
    assert terms["products bf16"] + terms["outputs of products"] == pytest.approx(11)
    assert terms["attention"] + terms["attention cut for overlap"] == pytest.approx(0.8)
    assert terms["memory-bound operators"] == pytest.approx(0.9)
    sends = ("messages between stages", "pipeline bubble", "context-parallel messages")
    assert sum(terms[name] for name in sends) == pytest.approx(0.75)
    assert terms["once a step"] == usual.terms["once a step"]
    assert found.seconds == pytest.approx(14.2 + terms["once a step"])
    text = found.calibration.text
    assert text.startswith("trace a.json, step 9: measured GEMMs 11 s (-3 %), attention 0.8 s (-33 %)")
    assert "exposed sends 0.75 s" in text and "exposed gathers and reductions 0.75 s" in text
    assert text.endswith("the rest as predicted; the trace does not contain model and layout")
    assert found.error_pct > usual.error_pct
    fewer = calibrated(trace(tmp_path / "b.json", {"nvjet_hsh_256x128": 11.0}), plan)
    assert {name for name in usual.terms if fewer.terms[name] != usual.terms[name]} == {
        "products bf16",
        "outputs of products",
    }


def test_a_trace_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    plan, path = planned(), trace(tmp_path / "a.json", KERNELS)
    assert calibrated(path, plan, plan).calibration.text.endswith("the rest as predicted")
    for recorded, text in (
        (planned(tp=8, pp=1, vp=1), "trace a.json was recorded with tp 8, but the prediction is for 4"),
        (planned(128), "trace a.json was recorded with gpus 128, but the prediction is for 64"),
    ):
        with pytest.raises(UsageError, match=text):
            calibrated(path, plan, recorded)
    for kernels, gpu, ranks, text in (
        (KERNELS, "NVIDIA A100-SXM4-80GB", 64, "was recorded on NVIDIA A100-SXM4-80GB, but the prediction is for h100"),
        (KERNELS, "NVIDIA H100 80GB HBM3", 8, "was recorded with gpus 8, but the prediction is for 64"),
        ({"nvjet_hsh_256x128": 1.0}, "NVIDIA H100 80GB HBM3", 64, "is not of this model, layout and batch: the MFU"),
    ):
        with pytest.raises(UsageError, match=text):
            calibrated(trace(path, kernels, gpu, ranks), plan)


def test_a_trace_of_a_cpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    step = torch.profiler.record_function("ProfilerStep#3")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, step:
        torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.export_chrome_trace(str(path))
    with pytest.raises(UsageError, match="has no GPU kernels, but predictions are for GPUs"):
        calibrated(path, planned())
