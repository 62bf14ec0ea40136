# SPDX-License-Identifier: Apache-2.0
"""Run folders and checkpoints of version 0.1, which named a model's architecture instead of its parts, are read."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Model
from llmb.runs.checkpoint import CheckpointRecord, model_differences
from llmb.runs.record import RunRecord

WRITTEN = Path(__file__).parent / "version_0_1"
MODELS = Catalogue().models


@pytest.mark.parametrize("name", ["llama3.1", "nemotron4", "llama4-maverick"])
def test_a_checkpoint_is_one_of_the_same_model(name: str) -> None:
    text = (WRITTEN / f"{name}-checkpoint.json").read_text()
    assert "architecture" in json.loads(text)["model"]
    record = CheckpointRecord.model_validate_json(text)
    assert record.model == MODELS[name, "tiny"]
    assert list(model_differences(MODELS[name, "tiny"], record.model)) == []


def test_a_run_is_read_and_written_as_one_of_now() -> None:
    record = RunRecord.model_validate_json((WRITTEN / "run.json").read_text())
    assert record.plan.recipe.model == MODELS["llama4-maverick", "tiny"]
    assert "architecture" not in record.plan.recipe.model.model_dump()
    assert RunRecord.model_validate_json(record.model_dump_json()) == record


def test_only_records_of_runs_may_name_an_architecture() -> None:
    fields = json.loads((WRITTEN / "llama3.1-checkpoint.json").read_text())["model"]
    with pytest.raises(ValidationError, match="architecture"):
        Model(**fields)


def test_an_architecture_that_version_0_1_did_not_have_is_refused() -> None:
    fields = json.loads((WRITTEN / "llama3.1-checkpoint.json").read_text())
    fields["model"]["architecture"] = "mamba"
    with pytest.raises(ValidationError, match="architecture"):
        CheckpointRecord(**fields)
