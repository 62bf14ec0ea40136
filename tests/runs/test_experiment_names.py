# SPDX-License-Identifier: Apache-2.0
"""Runs of different configurations have different names, which say how they differ from their recipe."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Overrides, Request, gpu_types_of, listed_scales, releases_of, resolve, sizes_of
from llmb.runs.choices import Choices
from llmb.runs.conditions import identity_of_plan
from llmb.runs.experiment import experiment_name
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan, make_plan

PLAIN = "pretrain_llama3.1_8b_bf16_gpus8_tp1_pp1_cp2_vp1_ep1_mbs1_gbs128_h100"
LONGEST_FILE_NAME = 255


def plan_of(overrides: dict[str, object], **choices: object) -> EnginePlan:
    request = Request(
        workload="pretrain_llama3.1", size="8b", gpu_type="h100", overrides=Overrides.model_validate(overrides)
    )
    return make_plan(resolve(Catalogue(), request), Choices.model_validate(choices), device="cuda")


@pytest.mark.parametrize(
    ("overrides", "choices", "end"),
    [
        ({}, {"steps": 60, "seed": 3, "window": "last", "label": "x", "save_checkpoint": True}, ""),
        ({"seq_len": 8192}, {}, ""),  # the recipe's own
        ({"seq_len": 4096}, {}, "_seq4096"),
        ({"layers": 12}, {}, "_proxy12of32"),
        ({}, {"recompute": "full"}, "_recompute-full"),
        ({}, {"compiled": False}, "_eager"),
        ({}, {"attention_backend": "flash"}, "_attention-flash"),
        ({}, {"grad_reduce_dtype": "fp32"}, "_reduce-fp32"),
        ({}, {"document_tokens": 512}, "_documents512"),
        ({}, {"parallelism": {"dp_sharding": "full"}}, "_shard-full"),
        ({}, {"parallelism": {"dp_sharding": "none"}}, "_shard-none"),
        ({"seq_len": 4096}, {"recompute": "selective", "checkpoint_interval": 5}, "_seq4096_save5_recompute-selective"),
    ],
)
def test_a_name_says_what_differs_from_the_recipe(
    overrides: dict[str, object], choices: dict[str, object], end: str
) -> None:
    assert experiment_name(plan_of(overrides, **choices)) == PLAIN + end


def test_split_of_the_pipeline_and_of_the_sequence_are_named() -> None:
    split = {"pp": 4, "tp": 2, "cp": 1, "first_stage_layers": 7, "last_stage_layers": 7, "sequence_parallel": False}
    assert experiment_name(plan_of(split)).endswith("_gbs128_h100_first7_last7_no-sp")


def test_the_program_and_its_arguments_are_named() -> None:
    plan = plan_of({})
    assert experiment_name(plan, "megatron_bridge") == f"{PLAIN}_megatron_bridge"
    one, other = (experiment_name(plan, "megatron_bridge", {"cuda_graphs": value}) for value in ("true", "false"))
    assert one.startswith(f"{PLAIN}_megatron_bridge_args-")
    assert one != other


def test_a_run_on_a_cpu_has_a_short_name(tiny_plan: Callable[..., EnginePlan]) -> None:
    name = experiment_name(tiny_plan(scale=4, overrides={"gbs": 16}))
    assert name == "pretrain_llama3.1_tiny_fp32_gpus4_tp1_pp1_cp1_vp1_ep1_mbs1_gbs16"


def test_a_name_with_every_setting_fits_into_the_name_of_a_file() -> None:
    everything = {
        "recompute": "full",
        "compiled": False,
        "attention_backend": "efficient",
        "keep_logits": True,
        "grad_reduce_dtype": "fp32",
        "document_tokens": 512,
        "checkpoint_interval": 10,
        "parallelism": {"dp_sharding": "optimizer"},
    }
    name = experiment_name(plan_of({"seq_len": 4096}, **everything))
    assert name.startswith(f"{PLAIN}_seq4096_set-")
    assert name != experiment_name(plan_of({"seq_len": 4096}, **{**everything, "keep_logits": False}))
    assert len(RunFolder(Path("/x") / name).batch_script.name) < LONGEST_FILE_NAME


def every_recipe() -> Iterator[tuple[Request, EnginePlan]]:
    catalogue = Catalogue()
    for workload in catalogue.workloads.values():
        for size in sizes_of(workload):
            for gpu_type in gpu_types_of(workload, size):
                for release in releases_of(workload, size) or [None]:
                    asked = Request(workload=workload.workload, size=size, gpu_type=gpu_type, release=release)
                    for dtype, scales in listed_scales(catalogue, asked).items():
                        for scale in (*scales.full, *scales.proxies):
                            request = Request(
                                workload=workload.workload,
                                size=size,
                                gpu_type=gpu_type,
                                release=release,
                                dtype=dtype,
                                scale=scale,
                            )
                            device = "cpu" if gpu_type == "cpu" else "cuda"
                            yield request, make_plan(resolve(catalogue, request), Choices(), device=device)


def test_published_recipes_with_one_name_compute_the_same() -> None:
    identities = defaultdict(set)
    for _, plan in every_recipe():
        identities[experiment_name(plan)].add(identity_of_plan(plan, "engine", {}).key)
    assert len(identities) > 300
    assert [name for name, keys in identities.items() if len(keys) > 1] == []
