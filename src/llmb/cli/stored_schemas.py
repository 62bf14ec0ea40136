# SPDX-License-Identifier: Apache-2.0
"""JSON Schemas of the files that llmb stores or reads, for ``llmb docs schema``."""

import ast
import inspect
from collections.abc import Iterator
from functools import cache, reduce
from importlib import import_module
from itertools import pairwise
from math import isfinite
from operator import or_
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from llmb.catalogue.record import ReasonedRecord
from llmb.errors import unknown
from llmb.missing import Missing

STORED = {
    "run.json": ("llmb.runs.record:RunRecord",),
    "metrics.jsonl": ("llmb.runs.steps:Step",),
    "rank_times.jsonl": ("llmb.runs.steps:RankTimes",),
    "job.json": ("llmb.runs.record:SubmittedJob",),
    "job_spec.json": ("llmb.jobspec.spec:JobSpec",),
    "job_end.json": ("llmb.runs.record:JobEnd",),
    "task.json": ("llmb.jobs.task:TaskRecord",),
    "cluster_config.yaml": ("llmb.schedulers.lookup:cluster_schema",),
    "campaign": ("llmb.campaigns.campaign:Campaign",),
    "catalogue": tuple(
        f"llmb.catalogue.schema:{name}File"
        for name in ("Workload", "Model", "Published", "Documents", "Hardware", "Fabrics", "Rates")
    ),
}
"""By the name of the file, the records that it may hold; of ``.jsonl`` a line holds it."""


class _Described(GenerateJsonSchema):
    """With the docstrings of fields as their descriptions, and with reasons as files have them."""

    def model_schema(self, schema: Any) -> dict[str, Any]:  # noqa: ANN401 (pydantic's own type is not of its interface)
        return _described(schema["cls"], super().model_schema(schema))

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:  # noqa: ANN401
        if schema["cls"] is Missing:
            return {"type": "null"}
        return _described(schema["cls"], super().dataclass_schema(schema))

    def encode_default(self, dft: Any) -> Any:  # noqa: ANN401
        no_json = isinstance(dft, Missing) or (isinstance(dft, float) and not isfinite(dft))
        return None if no_json else super().encode_default(dft)


def stored_schema(name: str) -> dict[str, Any]:
    """Raises UsageError for a file that has none."""
    if name not in STORED:
        raise unknown("stored file", name, STORED)
    records = [_record(place) for place in STORED[name]]
    return TypeAdapter(reduce(or_, records)).json_schema(schema_generator=_Described)


def _record(place: str) -> type:
    module, _, name = place.partition(":")
    found = getattr(import_module(module), name)
    return found if isinstance(found, type) else found()


def _described(record: type, schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    for base in reversed(record.__mro__):
        for name, text in _field_docstrings(base):
            if name in properties:
                properties[name]["description"] = text
    if issubclass(record, ReasonedRecord):
        reason = {"anyOf": [{"type": "string"}, {"type": "null"}]}
        properties |= {key: {**reason, "description": f"Why {name} is unknown."} for name, key in record.reason_keys()}
    return schema


def _field_docstrings(record: type) -> Iterator[tuple[str, str]]:
    statements = _classes(record.__module__).get(record.__name__, []) if record.__module__.startswith("llmb.") else []
    for field, below in pairwise(statements):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    source = ast.parse(inspect.getsource(import_module(module)))
    return {item.name: item.body for item in source.body if isinstance(item, ast.ClassDef)}
