# SPDX-License-Identifier: Apache-2.0
"""``run.json`` holds typed values, and the same plan again; what is not of this form is refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from recorded_runs import gpu_record, times_around, write_run

from llmb.base.missing import Missing
from llmb.catalogue.catalogue import Catalogue
from llmb.cli.main import app, exit_code_of
from llmb.runs.folder import BrokenRecord, RunFolder
from llmb.runs.plan import EnginePlan
from llmb.runs.planning import arguments_of_plan
from llmb.runs.record import RunRecord, read_record, write_record


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(write_run(tmp_path, gpu_record(), times_around(12.0)))


def test_what_is_written_again_has_the_same_keys_and_values(folder: RunFolder) -> None:
    written, record = folder.record.read_text(), read_record(folder)
    assert record.result and record.result.step_time_s and record.environment
    write_record(folder, record)
    assert folder.record.read_text() == written


def test_a_missing_value_is_null_with_its_reason_beside_it(folder: RunFolder) -> None:
    stored: dict[str, Any] = json.loads(folder.record.read_text())
    assert (stored["result"]["step_time_reason"], stored["result"]["verdict_reason"]) == (None, None)
    stored["result"] |= {"step_time_s": None, "step_time_reason": "too few steps"}
    record = RunRecord.model_validate_json(json.dumps(stored))
    assert record.result and record.result.step_time_s == Missing("too few steps")
    assert json.loads(record.model_dump_json()) == stored


@pytest.mark.parametrize(("part", "key"), [("result", "tokens_per_second"), ("environment", "torch_version")])
def test_a_key_that_nobody_knows_is_an_error(folder: RunFolder, part: str, key: str) -> None:
    spoiled: dict[str, Any] = json.loads(folder.record.read_text())
    spoiled[part][key] = 1
    with pytest.raises(ValidationError, match=key):
        RunRecord.model_validate(spoiled)


def test_a_record_of_a_development_version_is_refused_in_one_sentence(folder: RunFolder) -> None:
    folder.record.write_text(folder.record.read_text().replace('"schema_version": 3', '"schema_version": 2', 1))
    with pytest.raises(BrokenRecord, match="a development version before"):
        read_record(folder)


TINY = "-w pretrain_llama3.1 -s tiny --gpu-type cpu"
EXPERTS = "-w pretrain_mixtral -s tiny --gpu-type cpu"
TUNED = "-w finetune_llama3 -s tiny --gpu-type cpu --synthetic"
PLANS = (
    f"{TINY} --scale 1",
    f"{TINY} --scale 4 --tp 2 --mbs 2 --gbs 16 --seq-len 64 --steps 30 --window 5-20 --seed 7",
    f"{TINY} --scale 4 --pp 2 --vp 2 --dp-sharding none --recompute full --layers 8",
    f"{TINY} --scale 2 --dp-sharding full --gradient-sync micro-batch",
    f"{TINY} --scale 2 --dtype bf16 --grad-reduce-dtype bf16 --lr 1e-4 --warmup-steps 3 --document-tokens 20",
    f"{TINY} --scale 2 --tp 2 --no-sequence-parallel --no-resources --compile --window all --dtype fp8 --emulate-fp8",
    f"{TINY} --scale 1 --checkpoint-interval 10 --resource-interval 2 --stall-limit 60 --attention-backend flash",
    f"{TINY} --scale 2 --tp 2 --communication plain --free-sms 16",
    f"{EXPERTS} --scale 2 --capacity-factor 0 --ep 2",
    f"{EXPERTS} --scale 1 --force-load-balancing --deterministic",
    f"{EXPERTS} --scale 1 --dtype fp8 --group-experts",
    f"{EXPERTS} --pretend-scale 8 --rank 3 --steps 5",
    f"{TUNED} --scale 1 --document-tokens 12 --lora-alpha 3",
    f"{TUNED} --scale 1 --lora-rank 4 --lora-targets qv --window last",
)


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> EnginePlan:
    assert exit_code_of(app, ["run", *words, "--dry-run", "--json"]) == 0, capsys.readouterr().err
    return EnginePlan.model_validate(json.loads(capsys.readouterr().out)["plan"])


@pytest.mark.parametrize("options", PLANS)
def test_a_plan_is_made_again_by_its_own_options(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(options.split(), capsys)
    again = planned(arguments_of_plan(Catalogue(), plan), capsys)
    same = {"recipe": plan.recipe.model_copy(update={"unspecified": again.recipe.unspecified})}
    assert again == plan.model_copy(update=same)


def test_what_is_the_default_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = arguments_of_plan(Catalogue(), planned(f"{TINY} --scale 2 --gbs 16 --steps 20".split(), capsys))
    recipe = "--workload pretrain_llama3.1 --size tiny --dtype fp32 --scale 2 --gpu-type cpu"
    assert " ".join(words) == f"{recipe} --gbs 16 --steps 20"
