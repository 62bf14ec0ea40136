# SPDX-License-Identifier: Apache-2.0
"""Whole batch scripts, as kept in golden/. ``make golden`` writes them anew; read the difference before you commit."""

import os
import re
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_values import job_of, order_of, script_of

from llmb.base.errors import UsageError
from llmb.base.secrets import holds_secret
from llmb.catalogue.resolve import Overrides, Request
from llmb.jobs.order import Order
from llmb.launch.jobspec.job_options import Boost
from llmb.launch.slurm.script import PORT

GOLDEN = Path(__file__).with_name("golden")
LORA = {"workload": "finetune_llama3", "size": "70b"}
LLAMA = {"workload": "pretrain_llama3.1", "size": "405b", "release": "24.11"}
NEMOTRON = {"workload": "pretrain_nemotron4", "size": "340b"}
MAVERICK = {"workload": "finetune_llama4-maverick", "size": "400b"}
SITE = {"slurm": {"account": "research", "partition": "batch"}}

Make = Callable[[], Order]
# The commands of the documents, then what they leave out.
CASES: dict[str, Make] = {
    "lora-70b-fp8-8-b200": lambda: order_of(
        Request(**LORA, dtype="fp8", gpu_type="b200", scale=8),
        shell={"SBATCH_ACCOUNT": "research", "SBATCH_PARTITION": "batch"},
    ),
    "lora-70b-nodelist": lambda: order_of(
        Request(**LORA, dtype="bf16", gpu_type="b200", scale=8),
        shell={"ADDITIONAL_SLURM_PARAMS": "nodelist=node001,node002"},
        config=SITE,
    ),
    "lora-70b-constraint": lambda: order_of(
        Request(**LORA, dtype="fp8", gpu_type="b200", scale=8),
        shell={"ADDITIONAL_SLURM_PARAMS": "constraint=gpu&memory;exclusive"},
        config=SITE,
    ),
    "lora-70b-reservation": lambda: order_of(
        Request(**LORA, dtype="fp8", gpu_type="h100", scale=8),
        shell={"ADDITIONAL_SLURM_PARAMS": "reservation=my_reservation"},
        config=SITE,
    ),
    "lora-70b-32-gb200": lambda: order_of(
        Request(**LORA, dtype="bf16", gpu_type="gb200", scale=32), config={**SITE, "fabric": "infiniband"}
    ),
    "405b-576-h100": lambda: order_of(Request(**LLAMA, gpu_type="h100", scale=576), config=SITE),
    "405b-2304-h100": lambda: order_of(Request(**LLAMA, dtype="fp8", gpu_type="h100", scale=2304), config=SITE),
    "340b-2048-h100": lambda: order_of(
        Request(**NEMOTRON, gpu_type="h100", scale=2048), config=SITE, start="task-per-gpu"
    ),
    "maverick-256-h100": lambda: order_of(Request(**MAVERICK, gpu_type="h100", scale=256), config=SITE),
    "maverick-256-b200": lambda: order_of(Request(**MAVERICK, dtype="fp8", gpu_type="b200", scale=256), config=SITE),
    "pyxis-gcp": lambda: order_of(
        Request(**MAVERICK, gpu_type="h100", scale=256),
        config={
            **SITE,
            "fabric": "gcp-tcpxo",
            "environment": {"NCCL_DEBUG": "WARN"},
            "container": {
                "runtime": "pyxis",
                "image": "/images/llmb.sqsh",
                "mounts": ["/var/lib/tcpxo", "/scratch:/data"],
            },
        },
    ),
    "apptainer-modules": lambda: order_of(
        Request(**NEMOTRON, gpu_type="h100", scale=512),
        config={
            "modules": ["apptainer/1.3", "cuda"],
            "python": "/unused",
            "container": {"runtime": "apptainer", "image": "/images/llmb.sif", "python": "/opt/venv/bin/python"},
            "slurm": {
                "gpu_request": "gres",
                "gres_type": "h100",
                "flags": {"qos": "long"},
                "srun_flags": {"mpi": "none"},
            },
        },
        start="task-per-gpu",
    ),
    "nodes-set-up": lambda: order_of(
        Request(**LORA, dtype="bf16", gpu_type="gb200", scale=32),
        config={
            **SITE,
            "prolog": ["test -w /scratch", 'echo it\'s "$SLURMD_NODENAME"'],
            "vboost": 1,
            "binding": {"cpu": "cores", "numa": "local"},
        },
    ),
    "retries": lambda: order_of(
        Request(**LLAMA, gpu_type="h100", scale=576),
        flags={"signal": "B:USR1@120", "dependency": "afterok:41", "time": "2:00:00"},
        slurm_args=("mail-type=FAIL", "mem="),
        variables={"NCCL_DEBUG": "INFO"},
        shell={"NCCL_NVLS_ENABLE": "1"},
        config=SITE,
        retries=2,
    ),
    "tiny-cpu": lambda: order_of(
        Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=4),
        config={"slurm": {"gpus_per_node": 2}, "environment": {"GLOO_SOCKET_IFNAME": "lo"}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_as_it_was_valid_bash_and_without_secrets(name: str) -> None:
    script, golden = script_of(CASES[name]()), GOLDEN / f"{name}.sh"
    if os.environ.get("LLMB_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text(), "if this is meant: make golden"
    assert not holds_secret("", script)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_golden_script_belongs_to_a_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize(("scale", "nodes"), [(8, 2), (16, 4), (32, 8), (64, 16), (128, 32), (256, 64), (576, 144)])
def test_a_segment_is_the_largest_divisor_that_fits_an_nvlink_domain(scale: int, nodes: int) -> None:
    request = Request(**(LORA if scale < 576 else LLAMA), gpu_type="gb200", scale=scale)
    flags = job_of(order_of(request)).flags
    segment = int(flags["segment"])
    assert flags["nodes"] == str(nodes)
    assert nodes % segment == 0
    assert segment == max(size for size in range(1, 19) if nodes % size == 0)
    assert "segment" not in job_of(order_of(request, slurm_args=("segment=",))).flags
    assert job_of(order_of(request, flags={"segment": "2"})).flags["segment"] == "2"


def test_only_gpus_that_nvlink_connects_over_nodes_get_a_segment() -> None:
    assert "segment" not in job_of(CASES["405b-576-h100"]()).flags


def test_a_part_of_a_node_is_not_taken_whole() -> None:
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=1)
    flags = job_of(order_of(request)).flags
    assert flags["gpus-per-node"] == "1"
    assert not {"exclusive", "mem"} & set(flags)


def test_a_part_of_a_node_is_not_boosted() -> None:
    """Its other GPUs are of other jobs."""
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=1)
    config = {**SITE, "vboost": 1}
    assert job_of(order_of(request, config=config)).vboost is None
    whole = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=8)
    assert job_of(order_of(whole, config=config)).vboost == Boost(level=1)
    order = order_of(request, config=config)
    with pytest.raises(UsageError, match="vboost affects all GPUs of a node"):
        job_of(replace(order, options=replace(order.options, vboost=1)))
    whole_order = order_of(whole, config=config)
    assert job_of(replace(whole_order, options=replace(whole_order.options, vboost=0))).vboost is None


@pytest.mark.parametrize(
    ("release", "expected"), [("25.04", Boost(level=1, required=False)), ("24.11", None)], ids=["25.04", "24.11"]
)
def test_a_recipe_is_boosted_as_published_where_the_cluster_allows_it(release: str, expected: Boost | None) -> None:
    request = Request(workload="pretrain_llama3.1", size="405b", gpu_type="h100", scale=512, release=release)
    request = request if release == "25.04" else replace(request, scale=576)
    assert job_of(order_of(request, config=SITE)).vboost is None
    assert job_of(order_of(request, config={**SITE, "vboost": "recipe"})).vboost == expected


def test_a_scale_that_does_not_fill_nodes_is_refused_with_what_would() -> None:
    request = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="h100", scale=12, overrides=Overrides(gbs=24))
    with pytest.raises(UsageError, match=r"12 is not divisible by 8 .*\n.*--gpus-per-node 6, --gpus-per-node 4"):
        script_of(order_of(request))
    assert job_of(order_of(request, shell={"GPUS_PER_NODE": "4"})).flags["nodes"] == "3"


def test_a_port_that_is_in_use_is_not_chosen_and_no_two_jobs_have_one_id(program: Callable[[str, str], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as closed:
        in_use, free = taken.getsockname()[1], closed.getsockname()[1]
        closed.close()
        program("shuf", f'[ -e "$0.called" ] && echo {free} || echo {in_use}; : >"$0.called"')
        script = f'{PORT}\necho "$MASTER_PORT $LLMB_STORE_ID"'
        first, second = (
            subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True) for _ in "12"
        )
    port, name = first.stdout.split()
    assert port == str(free)
    assert re.fullmatch("[0-9a-f]{32}", name)
    assert name != second.stdout.split()[1]
