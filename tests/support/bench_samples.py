# SPDX-License-Identifier: Apache-2.0
"""Samples of the JSON documents of microbenchmarks."""

from typing import Any

from llmb.bench.gpus import compare_parts, outlier_rule
from llmb.bench.pairs import NodeReading, NodeVerdict, PairFigures, PairReading, PairwiseResult
from llmb.bench.records import CheckpointTrial, Measurement, MeasurementFile, NotMeasured, RepeatedStep
from llmb.checkpoints.times import RankTransfer, checkpoint_time
from llmb.report.bench_report import gpus_document, history_document, measurement_document, pairs_document
from llmb.schedulers.lookup import find_scheduler

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


def sample_trial() -> CheckpointTrial:
    ranks = [RankTransfer(rank=0, size_bytes=1, duration_s=0.1)]
    return CheckpointTrial(
        path="/scratch",
        file_system="ext4",
        mounted_at="/scratch",
        source="/dev/sda1",
        free_bytes=1,
        size_bytes=1,
        files=1,
        saved_after=1,
        killed="",
        save=checkpoint_time("save", 0.0, 0.1, 1, ranks),
        load=checkpoint_time("load", 0.0, 0.1, None, ranks),
        cache="dropped",
        cache_reason=None,
        steps=(RepeatedStep(step=1, loss=1.0, resumed_loss=1.0, grad_norm=1.0, resumed_grad_norm=1.0),),
        tolerance=0.0,
        runs=("", ""),
    )


def sample_measurements() -> dict[str, Any]:
    return measurement_document(sample_file().model_copy(update={"checkpoint": sample_trial()}))


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
        alone=(NodeReading(measurement="alone", node=0, figures=figures),),
        pairs=(PairReading(first=0, second=1, round=1, far=False, figures=figures, problem=None),),
    )
    return pairs_document(result, find_scheduler("slurm").host_list)
