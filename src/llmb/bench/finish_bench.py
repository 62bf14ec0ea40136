# SPDX-License-Identifier: Apache-2.0
"""What a job of measurements calls at its end: ``python -m llmb.bench.finish_bench RUN_FOLDER EXIT_CODE SIGNAL``.

It keeps the measurements, whether or not anybody waits for the job.
"""

import os
import sys
import time
from pathlib import Path
from statistics import median

import llmb
from llmb.bench.bench_job import END, REQUEST, BenchEnd, BenchRequest
from llmb.bench.collective_bench import TABLE, measurement_file, read_result
from llmb.bench.collectives import JOB, CollectiveJob
from llmb.bench.gpus import gpu_files, read_parts
from llmb.bench.kept_measurements import write_measurements
from llmb.bench.nccl_table import collective_texts
from llmb.bench.pair_agent import PairFiles
from llmb.bench.pair_verdict import decide, group_notes, members, pair_rule
from llmb.bench.pairs import ALONE, GROUP, PairJob, PairwiseResult, expected_s, limit_s
from llmb.bench.pairs import JOB as JOB_OF_PAIRS
from llmb.bench.records import MeasurementFile
from llmb.errors import LlmbError
from llmb.health.kept_checks import JudgedNodes, write_judged
from llmb.jobs.task import read_task
from llmb.jobspec.spec import read_spec
from llmb.runs.folder import RunFolder, write_atomically
from llmb.schedulers.lookup import find_scheduler


def finish_bench(folder: RunFolder, exit_code: int, signal: str) -> BenchEnd:
    """Never raises for workers that failed: what is missing is in the result."""
    request = BenchRequest.model_validate_json((folder.path / REQUEST).read_text())
    subject = read_task(folder).subject
    if subject == "pairwise":
        return _conclude_pairs(folder, request)
    measured: tuple[MeasurementFile, ...] = ()
    missing: tuple[str, ...] = ()
    problem = None
    try:
        measured = _collectives(folder.path, request) if subject == "collectives" else _gpus(folder.path, request)
    except LlmbError as error:
        problem = error.what
    if exit_code:
        how = f"signal {signal}" if signal else f"exit code {exit_code}"
        problem = f"the workers ended with {how}; see {folder.log}"
    if subject == "gpus":
        missing = _missing(folder, {file.node for file in measured})
    kept = tuple(str(write_measurements(Path(request.install), file)) for file in measured if file.measurements)
    end = BenchEnd(measured=measured, kept=kept, problem=problem, missing_nodes=missing)
    write_atomically(folder.path / END, end.model_dump_json(indent=2) + "\n")
    return end


def _collectives(folder: Path, request: BenchRequest) -> tuple[MeasurementFile, ...]:
    job, result = CollectiveJob.model_validate_json((folder / JOB).read_text()), read_result(folder)
    write_atomically(folder / TABLE, "\n".join(collective_texts(job, result, llmb.__version__)))
    return (measurement_file(job, result, request.command, request.measured_at),)


def _gpus(folder: Path, request: BenchRequest) -> tuple[MeasurementFile, ...]:
    return tuple(gpu_files(read_parts(folder), request.command, request.measured_at))


def _missing(folder: RunFolder, reported: set[str]) -> tuple[str, ...]:
    return tuple(node for node in _nodes(folder) if node not in reported)


def _nodes(folder: RunFolder) -> list[str]:
    scheduler = find_scheduler(read_spec(folder).scheduler)
    return scheduler.host_names(scheduler.current_job(os.environ).nodes)


def judged_nodes(result: PairwiseResult) -> JudgedNodes:
    named = {word: tuple(result.named(fit=fit)) for word, fit in (("fit", True), ("unfit", False), ("undecided", None))}
    return JudgedNodes(started_at=result.started_at, **named)


def _conclude_pairs(folder: RunFolder, request: BenchRequest) -> BenchEnd:
    """Whatever ended the agents: what they wrote counts."""
    job = PairJob.model_validate_json((folder.path / JOB_OF_PAIRS).read_text())
    files, rule = PairFiles(folder.path), pair_rule(job.device)
    here = files.nodes_here(job.nodes)
    known = [one.name for one in here.values()]
    others = iter(node for node in _nodes(folder) if node not in known)
    readings = files.readings([here[node].name if node in here else next(others) for node in range(job.nodes)])
    verdicts, notes = decide(readings, rule)
    group = members(verdicts)
    first = readings.found.get((GROUP, group[0])) if group else None
    result = PairwiseResult(
        started_at=request.measured_at,
        nodes=tuple(verdicts),
        notes=(*notes, *group_notes(readings, group, rule)),
        expected_s=expected_s(job.nodes),
        limit_s=limit_s(job.nodes),
        took_s=time.time() - median(one.began_s for one in here.values()) if here else 0.0,
        group=first.figures if first and not first.problem else None,
        alone=tuple(reading for (name, _), reading in readings.found.items() if name == ALONE),
        pairs=tuple(readings.pairs),
    )
    kept = write_judged(Path(request.install), judged_nodes(result))
    end = BenchEnd(kept=(str(kept),), pairwise=result)
    write_atomically(folder.path / END, end.model_dump_json(indent=2) + "\n")
    return end


if __name__ == "__main__":
    finish_bench(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
