# SPDX-License-Identifier: Apache-2.0
"""Repeats have the same identity and name, and no other runs have; what differs between repeats is a condition."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import ENGINE_DTYPES
from llmb.catalogue.resolve import Overrides, Request, gpu_types_of, listed_scales, releases_of, resolve, sizes_of
from llmb.runs.checkpoints.origin import DataOrigin, Origin, WeightsOrigin
from llmb.runs.choices import Choices
from llmb.runs.conditions import conditions_of, differences, identity_of, identity_of_plan, speed_variables
from llmb.runs.environment import Environment, GpuState
from llmb.runs.experiment import experiment_name
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan, Plan, make_plan
from llmb.runs.record import BegunJob, RunRecord, may_be_short_id, new_record, queued_record, short_id

SQUAD = DataOrigin(kind="dataset", name="SQuAD, packed to 4096")


def plan_of(size: str = "8b", gpu_type: str = "h100", **choices: object) -> EnginePlan:
    overrides = Overrides.model_validate(choices.pop("overrides", {}))
    request = Request(workload="pretrain_llama3.1", size=size, gpu_type=gpu_type, overrides=overrides)
    return make_plan(resolve(Catalogue(), request), Choices.model_validate(choices), device="cuda")


def record_of(plan: Plan, **fields: object) -> RunRecord:
    return queued_record(plan, ()).model_copy(update=fields)


def maverick(etp: int) -> Plan:
    request = Request(workload="finetune_llama4-maverick", size="400b", overrides=Overrides(etp=etp))
    return make_plan(resolve(Catalogue(), request), Choices(synthetic=True), device="cuda")


BASE = record_of(plan_of())
OTHERS = {
    "sequence length": record_of(plan_of(overrides={"seq_len": 4096})),
    "layers": record_of(plan_of(overrides={"layers": 16})),
    "tensor parallelism": record_of(plan_of(overrides={"tp": 2})),
    "sequence parallelism": record_of(plan_of(overrides={"tp": 2, "sequence_parallel": False})),
    "GPU type": record_of(plan_of(gpu_type="b200")),
    "program": record_of(plan_of(), program="megatron_bridge"),
    "arguments of a framework": record_of(plan_of(), arguments={"cuda_graphs": "true"}),
    "data": record_of(
        plan_of().model_copy(update={"declared_origin": Origin(weights=WeightsOrigin(kind="random"), data=SQUAD)})
    ),
    "recompute": record_of(plan_of(recompute="full")),
    "documents": record_of(plan_of(document_tokens=512)),
    "compiled": record_of(plan_of(compiled=False)),
    "sharding": record_of(plan_of(parallelism={"dp_sharding": "none"})),
    "interval": record_of(plan_of(checkpoint_interval=5)),
}


def test_runs_of_another_configuration_have_another_identity() -> None:
    assert len({identity_of(record).key for record in (BASE, *OTHERS.values())}) == len(OTHERS) + 1
    own = identity_of(BASE).configuration
    assert [name for name, other in OTHERS.items() if not differences(own, identity_of(other).configuration)] == []


def test_tensor_parallelism_of_experts_is_part_of_the_identity() -> None:
    eight, four = record_of(maverick(8)), record_of(maverick(4))
    changed = differences(identity_of(eight).configuration, identity_of(four).configuration)
    assert [(item.key, item.before, item.after) for item in changed] == [("layout.etp", 8, 4)]


def test_repeats_have_the_same_identity(environment: Environment) -> None:
    other = record_of(
        plan_of(seed=7, steps=60, label="night", window="last"),
        label="night",
        started_at="2026-01-01T00:00:00+00:00",
        environment=environment.model_copy(update={"nodes": ("node7",)}),
        llmb_commit="0" * 40,
        image="other.sqsh",
    )
    assert identity_of(other).key == identity_of(BASE).key
    changed = {item.key for item in differences(conditions_of(BASE), conditions_of(other))}
    assert {"nodes", "seed", "steps", "window.first", "window.rule", "label"} <= changed
    assert {"software.llmb_commit", "software.image"} <= changed


@pytest.fixture
def environment() -> Environment:
    gpus = tuple(
        GpuState(node="node1", index=index, uuid=f"GPU-{index}", power_limit_w=limit, max_sm_clock_mhz=1980)
        for index, limit in enumerate((700, 650))
    )
    return Environment(
        python="3.12.1",
        torch="2.9.1",
        cuda="12.8",
        nccl="2.27.3",
        backend="nccl",
        float32_matmul_precision="highest",
        system="Linux",
        device="NVIDIA H100 80GB HBM3",
        device_memory_gib=79.1,
        cpu_threads_per_rank=8,
        nodes=("node1", "node2"),
        ranks_per_node={"node1": 1, "node2": 1},
        variables={"NCCL_ALGO": "Ring", "NCCL_DEBUG_FILE": "/x", "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0"},
        driver="580.65.06",
        cudnn="9.10.2",
        ptxas="12.8.93",
        gpus=gpus,
    )


def test_conditions_have_software_hardware_and_nodes(environment: Environment) -> None:
    found = conditions_of(record_of(plan_of(), environment=environment, label="night"))
    assert found["software.driver"] == "580.65.06"
    assert found["software.cudnn"] == "9.10.2"
    assert found["software.ptxas"] == "12.8.93"
    assert found["software.nccl"] == "2.27.3"
    assert found["hardware.device"] == "NVIDIA H100 80GB HBM3"
    assert found["hardware.gpu_uuids"] == "GPU-0,GPU-1"
    assert found["hardware.power_limit_w"] == "650.0,700.0"  # they differ, which may explain why a run is slow
    assert found["hardware.max_sm_clock_mhz"] == 1980
    assert found["nodes"] == "node1,node2"
    assert found["label"] == "night"
    assert found["variables.NCCL_ALGO"] == "Ring"
    assert [key for key in found if key.startswith("variables.")] == ["variables.NCCL_ALGO"]


def test_conditions_of_a_queued_run_are_unknown_not_absent() -> None:
    queued = conditions_of(BASE)
    assert queued["software.driver"] is None
    assert queued["hardware.gpu_uuids"] is None
    assert queued["nodes"] is None
    job = BegunJob(scheduler="slurm", job_id="7", nodes="node[1-2]")
    assert conditions_of(BASE.model_copy(update={"job": job}))["nodes"] == "node[1-2]"


def test_names_of_jobs_and_folders_are_no_conditions() -> None:
    own = {"NCCL_DEBUG_FILE": "/run/1", "SLURM_JOB_ID": "4711", "LLMB_INSTALL": "/data", "OMP_NUM_THREADS": "8"}
    assert speed_variables(own) == {"OMP_NUM_THREADS": "8"}


def test_a_new_record_says_which_llmb_ran(tiny_plan: Callable[..., EnginePlan]) -> None:
    record = new_record(tiny_plan(), (), label="a", image="b")
    assert (record.label, record.image) == ("a", "b")
    assert (record.llmb_commit is None) <= (record.llmb_commit_reason is not None)


def test_short_ids_are_stable_and_no_number() -> None:
    assert short_id("x_1795298746") == "yuzwlsnl"
    assert may_be_short_id("yuz")
    for text in ("4711", "latest", "", "deadbeef", "2026-11-20", "yuzwlsnlk"):
        assert not may_be_short_id(text)
    names = [short_id(f"run_{second}") for second in range(20_000)]
    assert len(set(names)) == len(names)


PLAIN = "pretrain_llama3.1_8b_bf16_gpus8_tp1_pp1_cp2_vp1_ep1_mbs1_gbs128_h100"
LONGEST_FILE_NAME = 255


def plan_with(overrides: dict[str, object], **choices: object) -> EnginePlan:
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
        ({}, {"deterministic": True}, "_deterministic"),
        ({}, {"communication": "plain", "free_sms": 16}, "_communication-plain_free-sms16"),
        ({}, {"group_experts": True}, "_grouped-experts"),
        ({}, {"grad_reduce_dtype": "fp32"}, "_reduce-fp32"),
        ({}, {"document_tokens": 512}, "_documents512"),
        ({}, {"parallelism": {"dp_sharding": "full"}}, "_shard-full"),
        ({}, {"parallelism": {"dp_sharding": "none"}}, "_shard-none"),
        ({}, {"parallelism": {"dp_sharding": "full", "gradient_sync": "micro-batch"}}, "_shard-full_sync-micro-batch"),
        ({"seq_len": 4096}, {"recompute": "selective", "checkpoint_interval": 5}, "_seq4096_save5_recompute-selective"),
    ],
)
def test_a_name_says_what_differs_from_the_recipe(
    overrides: dict[str, object], choices: dict[str, object], end: str
) -> None:
    assert experiment_name(plan_with(overrides, **choices)) == PLAIN + end


def test_split_of_the_pipeline_and_of_the_sequence_are_named() -> None:
    split = {"pp": 4, "tp": 2, "cp": 1, "first_stage_layers": 7, "last_stage_layers": 7, "sequence_parallel": False}
    assert experiment_name(plan_with(split)).endswith("_gbs128_h100_first7_last7_no-sp")


def test_the_program_and_its_arguments_are_named() -> None:
    plan = plan_with({})
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
    name = experiment_name(plan_with({"seq_len": 4096}, **everything))
    assert name.startswith(f"{PLAIN}_seq4096_set-")
    assert name != experiment_name(plan_with({"seq_len": 4096}, **{**everything, "keep_logits": False}))
    assert len(RunFolder(Path("/x") / name).batch_script.name) < LONGEST_FILE_NAME


def every_recipe() -> Iterator[tuple[Request, EnginePlan]]:
    catalogue = Catalogue()
    for workload in catalogue.workloads.values():
        for size in sizes_of(workload):
            for gpu_type in gpu_types_of(workload, size) if catalogue.is_trainable(workload, size) else ():
                for release in releases_of(workload, size) or [None]:
                    asked = Request(workload=workload.workload, size=size, gpu_type=gpu_type, release=release)
                    for dtype, scales in listed_scales(catalogue, asked).items():
                        for scale in (*scales.full, *scales.proxies) if dtype in ENGINE_DTYPES else ():
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
