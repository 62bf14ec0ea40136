# SPDX-License-Identifier: Apache-2.0
"""What a job of a recipe asks for, from the shipped data."""

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue, find_fabric, job_defaults
from llmb.catalogue.resolve import Request, gpu_types_of, resolve, sizes_of
from llmb.catalogue.schema import JobsEntry
from llmb.launch.jobspec.spec import variable_problems


@pytest.mark.parametrize(
    ("request_", "minutes"),
    [
        (Request(workload="pretrain_llama3.1", size="405b", scale=576, release="24.11"), 60),
        (Request(workload="pretrain_llama3.1", size="405b", scale=512), 30),
        (Request(workload="pretrain_llama3.1", size="8b", scale=8), 30),
        (Request(workload="pretrain_nemotron4", size="340b", scale=2048), 30),
        (Request(workload="finetune_llama4-maverick", size="400b", scale=256), 15),
        (Request(workload="finetune_llama3", size="70b", scale=8, gpu_type="b200"), 15),
    ],
)
def test_time_limits_are_those_of_the_documents(catalogue: Catalogue, request_: Request, minutes: int) -> None:
    defaults = job_defaults(catalogue, resolve(catalogue, request_))
    assert defaults.time_limit_min == minutes
    assert "launch.sh line" in defaults.time_limit_source or "executors.py" in defaults.time_limit_source


def variables(catalogue: Catalogue, **request: object) -> dict[str, str]:
    defaults = job_defaults(catalogue, resolve(catalogue, Request(workload="pretrain_llama3.1", **request)))
    return {variable.name: variable.value for variable in defaults.variables}


def test_variables_hold_for_the_recipes_that_they_name(catalogue: Catalogue) -> None:
    assert variables(catalogue, size="tiny", gpu_type="cpu") == {}
    chunk = "NCCL_P2P_NET_CHUNKSIZE"
    assert variables(catalogue, size="405b", scale=576, release="24.11")[chunk] == "262144"
    assert variables(catalogue, size="405b", scale=512)[chunk] == "2097152"
    assert chunk not in variables(catalogue, size="8b", scale=8)
    assert chunk not in variables(catalogue, size="405b", scale=32, release="25.04")
    qps = "NCCL_IB_QPS_PER_CONNECTION"
    assert variables(catalogue, size="405b", scale=512, gpu_type="b300")[qps] == "4"
    assert qps not in variables(catalogue, size="70b", scale=256, gpu_type="b300")
    assert qps not in variables(catalogue, size="405b", scale=512, gpu_type="b200")
    assert variables(catalogue, size="8b", scale=8, gpu_type="gb200")["NCCL_NET_GDR_C2C"] == "1"


@pytest.mark.parametrize(
    ("workload", "size", "scale", "release", "level"),
    [
        ("pretrain_llama3.1", "405b", 576, "24.11", None),
        ("pretrain_llama3.1", "405b", 512, "25.04", 1),
        ("pretrain_nemotron4", "15b", 16, None, 1),
        ("finetune_llama4-maverick", "400b", 256, None, 1),
        ("finetune_llama3", "70b", 8, None, None),
    ],
)
def test_a_boost_is_asked_for_as_published(
    catalogue: Catalogue, workload: str, size: str, scale: int, release: str | None, level: int | None
) -> None:
    gpu_type = (
        "b200" if workload == "finetune_llama4-maverick" else "gb200" if workload == "finetune_llama3" else "h100"
    )
    request = Request(workload=workload, size=size, scale=scale, release=release, gpu_type=gpu_type)
    defaults = job_defaults(catalogue, resolve(catalogue, request))
    assert (defaults.vboost, bool(defaults.vboost_source)) == (level, level is not None)


def test_nodes_are_those_of_the_gpu_type(catalogue: Catalogue) -> None:
    for gpu_type, expected in {"h100": (8, 1), "gb200": (4, 18), "cpu": (None, 1)}.items():
        request = Request(workload="pretrain_llama3.1", size="tiny", gpu_type=gpu_type)
        defaults = job_defaults(catalogue, resolve(catalogue, request))
        assert (defaults.gpus_per_node, defaults.nvlink_domain_nodes) == expected


def test_every_recipe_has_defaults_that_a_batch_script_can_hold(catalogue: Catalogue) -> None:
    for name, workload in catalogue.workloads.items():
        for size in sizes_of(workload):
            for gpu_type in gpu_types_of(workload, size):
                recipe = resolve(catalogue, Request(workload=name, size=size, gpu_type=gpu_type))
                defaults = job_defaults(catalogue, recipe)
                assert defaults.time_limit_min > 0
                assert not list(variable_problems({item.name: item.value for item in defaults.variables}))
                assert all(item.source for item in defaults.variables)


def test_fabrics_hold_what_a_batch_script_can(catalogue: Catalogue) -> None:
    for fabric in catalogue.fabrics.values():
        assert not list(variable_problems(fabric.variables))
        assert fabric.source
    with pytest.raises(UsageError, match="did you mean 'infiniband'"):
        find_fabric(catalogue, "infinband")


def test_a_workload_needs_a_time_limit_for_every_recipe() -> None:
    limit = {"minutes": 5, "source": "x"}
    assert JobsEntry(time_limits=[limit]).time_limits[0].minutes == 5
    with pytest.raises(ValueError, match="must apply to every recipe"):
        JobsEntry(time_limits=[{**limit, "sizes": ["8b"]}])
    with pytest.raises(ValueError, match="must apply to every recipe"):
        JobsEntry(time_limits=[])
