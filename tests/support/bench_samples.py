# SPDX-License-Identifier: Apache-2.0
"""Samples of the JSON documents of microbenchmarks."""

from typing import Any

from llmb.launch.scheduler_lookup import find_scheduler
from llmb.nodes.bench.measurements import Measurement, MeasurementFile, NotMeasured
from llmb.nodes.bench.pairs import NodeReading, NodeVerdict, PairFigures, PairReading, PairwiseResult
from llmb.nodes.bench.slow_gpus import compare_parts, gpus_document, outlier_rule
from llmb.reports.bench_report import history_document, measurement_document, pairs_document

ROW = Measurement(benchmark="gemm", case="qkv_forward", node="node1", device="", time_s=0.1, repetitions=3)


def sample_file() -> MeasurementFile:
    missing = NotMeasured(benchmark="gemm", case="qkv_forward", reason="")
    return MeasurementFile(
        node="node1",
        measured_at="2026-11-22T10:00:00+00:00",
        command=("llmb",),
        software={"torch": None},
        measurements=(ROW,),
        not_measured=(missing,),
    )


def sample_measurements() -> dict[str, Any]:
    return measurement_document(sample_file())


def sample_history() -> dict[str, Any]:
    return history_document([sample_file(), sample_file()], None)


def sample_gpus() -> dict[str, Any]:
    row = ROW.model_copy(update={"rank": 0, "tflops": 1.0})
    file = sample_file().model_copy(update={"measurements": (row,)})
    return gpus_document(compare_parts([file], ["node2"], outlier_rule()), outlier_rule())


def sample_pairs() -> dict[str, Any]:
    figures = PairFigures(tflops=1.0, gb_per_s=1.0, latency_s=1.0)
    result = PairwiseResult(
        started_at="",
        nodes=(NodeVerdict(node="node1", fit=True), NodeVerdict(node="node2", fit=False, evidence=("",))),
        notes=("",),
        expected_s=1.0,
        limit_s=1.0,
        took_s=1.0,
        group=figures,
        alone=(NodeReading(node=0, figures=figures),),
        pairs=(PairReading(first=0, second=1, round=1, far=False, figures=figures, problem=None),),
    )
    return pairs_document(result, find_scheduler("slurm").host_list)
