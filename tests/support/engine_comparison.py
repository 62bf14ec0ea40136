# SPDX-License-Identifier: Apache-2.0
"""Settings, subjects and results for tests of the engine comparison."""

from benchmarks.engine.cases import find_subject
from benchmarks.engine.published import find_target
from benchmarks.engine.records import CaseResult, Published, Settings

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype
from llmb.launch.site.site import Machine

CATALOGUE = Catalogue()
H200 = Machine(("NVIDIA H200",), 16)
SETTINGS = Settings(
    gpu_type="h200",
    device="NVIDIA H200",
    torch="2.11.0",
    tiny=False,
    warmup_steps=2,
    steps=4,
    seed=1,
    compiled=True,
    llmb_options="",
    expandable_segments=False,
)


def subject(name, dtype=Dtype.BF16, machine=H200, micro_batches=4):
    return find_subject(
        CATALOGUE, name, dtype, machine, gpu_type=None, tiny=False, micro_batches=micro_batches
    )  # fmt: skip


def case_result(engine="llmb", *, status="done", times=(1.0,), tokens_per_s=100.0, mfu=50.0, number=0, dtype="bf16"):
    return CaseResult(
        engine=engine, engine_version="1", model="8b", workload="pretrain_llama3.1", size="8b", dtype=dtype,
        gpu_type="h200", proxy=True, layers=20, vocab_size=80128, experts=None, parameters=1, mbs=1, ga=4, gbs=4,
        seq_len=8192, round=number, status=status, reason=None if status == "done" else "boom", code="c",
        step_times_s=times if status == "done" else (), tokens_per_s=tokens_per_s if status == "done" else None,
        mfu_pct={"published": mfu} if status == "done" else None,
    )  # fmt: skip


def target_of(mfu_pct):
    found = find_target(CATALOGUE, "pretrain_llama3.1", "8b", Dtype.BF16)
    return Published(model="8b", dtype=Dtype.BF16, **{**found.model_dump(), "mfu_pct": mfu_pct})
