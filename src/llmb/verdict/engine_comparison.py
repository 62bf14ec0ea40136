# SPDX-License-Identifier: Apache-2.0
"""Runs of several engines, by the JSON document of their comparison in ``benchmarks``."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from llmb.base.errors import UsageError
from llmb.base.input_files import read_text_file
from llmb.base.statistics import describe
from llmb.runs.analyzed_run import AnalyzedRun, FoundRuns
from llmb.runs.identity import RunIdentity, Value

LAYOUT = ("mbs", "gbs", "seq_len", "layers")
SAME = ("workload", "size", "dtype", "gpu_type", "vocab_size", "experts")
LLMB = "llmb"
"""What the document calls the engine that its options are for."""


class EngineCase(BaseModel):
    """One engine, model, dtype, batch and round; fields that are not compared are not read.

    variant: what llmb does otherwise than it is used. outdated: why the result is not one of the present code.
    """

    engine: str
    variant: str | None = None
    engine_version: str | None
    model: str
    workload: str
    size: str
    dtype: str
    gpu_type: str
    layers: int
    vocab_size: int
    experts: int | None
    mbs: int
    gbs: int
    seq_len: int
    round: int
    status: Literal["done", "failed", "not_run"]
    reason: str | None = None
    outdated: str | None = None
    step_times_s: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        parts = (self.engine, self.variant, self.model, self.dtype, f"gbs{self.gbs}", str(self.round))
        return "-".join(part for part in parts if part)


class EngineDocument(BaseModel):
    """A comparison of engines (docs/how-to/compare-engines.md). Version 1 has neither variants nor outdated cases."""

    schema_version: Literal[1, 2]
    kind: Literal["engine-comparison"]
    settings: dict[str, Any]
    environment: dict[str, Any]
    cases: tuple[EngineCase, ...]


def runs_of_engines(path: Path, title: str) -> FoundRuns:
    """One run for each case and round. Raises UsageError if the file is not such a document."""
    text = read_text_file(path)
    try:
        document = EngineDocument.model_validate_json(text)
    except ValidationError as error:
        do = "give the file that 'python -m benchmarks.engine --out FILE' wrote, or a folder of runs or logs"
        raise UsageError("this JSON file is not a comparison of engines", where=str(path), do=do) from error
    return FoundRuns(title, tuple(_engine_run(path, document, case) for case in document.cases))


def _engine_run(path: Path, document: EngineDocument, case: EngineCase) -> AnalyzedRun:
    done = case.status == "done" and case.outdated is None and bool(case.step_times_s)
    return AnalyzedRun(
        id=case.name,
        path=Path(f"{path.absolute()}#{case.name}"),
        identity=RunIdentity(configuration=_engine_configuration(document, case)),
        conditions=_engine_conditions(document, case),
        started_s=document.environment.get("started_unix_s"),
        status="success" if done else "outdated" if case.outdated else case.status,
        reason=None if done else case.outdated or case.reason,
        step_times_s=case.step_times_s if done else (),
        step_time_s=describe(case.step_times_s) if done else None,
    )


def _engine_configuration(document: EngineDocument, case: EngineCase) -> dict[str, Value]:
    values = case.model_dump()
    own = {"arguments.llmb_options": document.settings.get("llmb_options")} if case.engine == LLMB else {}
    if case.variant:
        own["arguments.variant"] = case.variant
    return {
        "program": case.engine,
        **{key: values[key] for key in SAME},
        **{f"layout.{key}": values[key] for key in LAYOUT},
        "layout.gpus": 1,
        "compiled": document.settings.get("compiled"),
        **own,
    }


def _engine_conditions(document: EngineDocument, case: EngineCase) -> dict[str, Value]:
    settings, environment = document.settings, document.environment
    gpu = environment.get("gpu_before") or {}
    return {
        f"software.{case.engine}": case.engine_version,
        "software.torch": settings.get("torch"),
        "software.python": environment.get("python"),
        "software.system": environment.get("system"),
        "software.driver": gpu.get("driver_version"),
        "hardware.device": settings.get("device"),
        "hardware.power_limit": gpu.get("power.limit"),
        "hardware.max_sm_clock": gpu.get("clocks.max.sm"),
        "variables.expandable_segments": settings.get("expandable_segments"),
        "seed": settings.get("seed"),
        "steps": settings.get("steps"),
    }
