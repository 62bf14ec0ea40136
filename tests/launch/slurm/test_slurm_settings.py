# SPDX-License-Identifier: Apache-2.0
"""Where each setting of a job comes from, what a partition brings, and what is refused."""

from pathlib import Path

import pytest
from called_here import Run
from slurm_values import job_of, order_of

from llmb.base.errors import UsageError
from llmb.catalogue.resolve import Request
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.site.cluster_config import read_cluster_file
from llmb.launch.site.site import Site
from llmb.launch.slurm.request import job_flags, shell_gpus_per_node
from llmb.launch.slurm.scheduler import SlurmScheduler
from llmb.launch.slurm.settings import TIME, parse_additional

LLAMA = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=16)


def flag(name: str, **given: object) -> str | None:
    return job_of(order_of(LLAMA, **given)).flags[name]


def test_the_nearest_layer_decides() -> None:
    """Recipe, then cluster, then the shell's variables, then ADDITIONAL_SLURM_PARAMS, then options."""
    config = {"slurm": {"flags": {"time": "1:00:00"}}}
    shell = {"TIME_LIMIT": "2:00:00", "SBATCH_TIMELIMIT": "9"}
    additional = {**shell, "ADDITIONAL_SLURM_PARAMS": "time=3:00:00"}
    assert flag("time") == "00:30:00"
    assert flag("time", config=config) == "1:00:00"
    assert flag("time", config=config, shell=shell) == "2:00:00"
    assert flag("time", config=config, shell=additional) == "3:00:00"
    assert flag("time", config=config, shell=additional, flags={"time": "4:00:00"}) == "4:00:00"


def test_variables_of_the_nearest_layer_decide() -> None:
    name = "NCCL_NVLS_ENABLE"

    def value(**given: object) -> tuple[str, str]:
        (found,) = [item for item in job_of(order_of(LLAMA, **given)).variables if item.name == name]
        return found.value, found.origin

    cluster = {"environment": {name: 2}}
    workload = {**cluster, "workloads": {"pretrain_llama3.1": {"environment": {name: 3}}}}
    assert value() == ("0", "recipe")
    assert value(shell={name: "1"}) == ("1", "the shell that submitted")
    assert value(shell={name: "1"}, config=cluster) == ("2", "cluster_config.yaml")
    assert value(config=workload) == ("3", "cluster_config.yaml, workload")
    assert value(config=workload, variables={name: "4"}) == ("4", "--env")


@pytest.mark.parametrize("name", ["mem-per-gpu", "mem-per-cpu"])
def test_flags_of_memory_replace_each_other(name: str) -> None:
    """sbatch refuses a script that has two of them."""
    assert flag("mem") == "0"
    config = {"slurm": {"flags": {name: "180G"}}}
    for given in ({"config": config}, {"flags": {name: "180G"}}, {"slurm_args": (f"{name}=180G",)}):
        flags = job_of(order_of(LLAMA, **given)).flags
        assert (flags[name], "mem" in flags) == ("180G", False)
    flags = job_of(order_of(LLAMA, config=config, slurm_args=("mem=10G",))).flags
    assert (flags["mem"], name in flags) == ("10G", False)


def test_flags_per_gpu_of_a_cluster_are_not_those_of_jobs_without_gpus() -> None:
    config = {"slurm": {"flags": {"mem-per-gpu": "180G", "cpus-per-gpu": 4, "qos": "high"}}}
    on_cpus = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=2)
    flags = job_of(order_of(on_cpus, config=config)).flags
    assert ("mem-per-gpu" in flags, "cpus-per-gpu" in flags, flags["qos"]) == (False, False, "high")
    assert flags["cpus-per-task"] == "2"


def test_a_job_never_waits_for_what_cannot_come() -> None:
    assert flag("kill-on-invalid-dep", flags={"dependency": "afterok:1"}) == "yes"
    given = order_of(LLAMA, flags={"dependency": "afterok:1"}, slurm_args=("kill-on-invalid-dep=no",))
    assert job_of(given).flags["kill-on-invalid-dep"] == "no"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", {}),
        ("nodelist=node001,node002", {"nodelist": "node001,node002"}),
        ("nodelist=node001,node002;constraint=gpu", {"nodelist": "node001,node002", "constraint": "gpu"}),
        ("constraint=gpu&memory;exclusive", {"constraint": "gpu&memory", "exclusive": None}),
        (" a=b,c ; d=e;", {"a": "b,c", "d": "e"}),
        ("--qos=high", {"qos": "high"}),
    ],
)
def test_additional_parameters_are_read_as_documented(text: str, flags: dict[str, str | None]) -> None:
    assert parse_additional(text) == flags


def test_commas_between_parameters_are_not_guessed_at() -> None:
    with pytest.raises(UsageError, match="separate flags with ';'"):
        parse_additional("nodelist=node001,constraint=gpu")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"flags": {"account": "a\nb"}}, "an unprintable character"),
        ({"flags": {"time": "tomorrow"}}, "the time limit is 'tomorrow'"),
        ({"flags": {"nice": "high"}}, "nice is 'high'"),
        ({"slurm_args": ("array=0-3",)}, "'array' cannot be set: it is determined by --repeats"),
        ({"shell": {"ADDITIONAL_SLURM_PARAMS": "array=0-3"}}, "'array' cannot be set: it is determined by --repeats"),
        ({"shell": {"ADDITIONAL_SLURM_PARAMS": "qos=high;requeue"}}, "'requeue' cannot be set: it is determined"),
        ({"slurm_args": ("nodes=3",)}, "is determined by --scale"),
        ({"slurm_args": ("output=x",)}, "is determined by the run folder"),
        ({"slurm_args": ("A=x",)}, "'A' is not a long name"),
        ({"slurm_args": ("a b=x",)}, "'a b' is not a long name"),
        ({"slurm_args": ("qos=a", "qos=b")}, "has duplicate key 'qos'"),
        ({"flags": {"qos": "a"}, "slurm_args": ("qos=b",)}, "both set qos"),
        ({"slurm_args": ("mem=1G", "mem-per-gpu=1G")}, "mem and mem-per-gpu are mutually exclusive"),
        ({"shell": {"ADDITIONAL_SLURM_PARAMS": "nodes=3"}}, "is determined by --scale"),
        ({"shell": {"GPUS_PER_NODE": "many"}}, "GPUS_PER_NODE is 'many'"),
        ({"config": {"fabric": "token-ring"}}, "unknown fabric 'token-ring'"),
        ({"config": {"fabric": "azure-infiniband"}}, "needs this cluster's values of NCCL_TOPO_FILE"),
        ({"install": Path("/a\\b")}, "Slurm cannot write"),
        ({"install": Path("/a\nb")}, "Slurm cannot write"),
        ({"install": Path("/a,b"), "config": {"container": {"runtime": "pyxis", "image": "x"}}}, "cannot mount '/a,b'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        job_of(order_of(LLAMA, **given))


GRES = {"slurm": {"gpu_request": "gres", "gres_type": "h100", "flags": {"gres": "nvme:1"}}}


@pytest.mark.parametrize(
    ("given", "requested"),
    [
        ({}, {"gpus-per-node": "8"}),
        ({"shell": {"SBATCH_GPUS_PER_NODE": "8"}}, {"gpus-per-node": "8"}),
        ({"shell": {"SBATCH_GPUS_PER_NODE": "null"}}, {}),
        ({"shell": {"SLURM_GPUS_PER_NODE": "NULL", "GPUS_PER_NODE": "8"}}, {}),
        ({"shell": {"SLURM_GPUS_PER_NODE": "null", "SBATCH_GPUS_PER_NODE": "8"}}, {"gpus-per-node": "8"}),
        ({"shell": {"SLURM_GPUS_PER_NODE": "null"}, "config": GRES}, {}),
        ({"shell": {"SLURM_GPUS_PER_NODE": "null"}, "flags": {"gres": "gpu:8"}}, {"gres": "gpu:8"}),
        ({"shell": {"ADDITIONAL_SLURM_PARAMS": "gres=gpu:8"}}, {"gres": "gpu:8"}),
        ({"shell": {"ADDITIONAL_SLURM_PARAMS": "gres=gpu:h100:8,nvme:1"}}, {"gres": "gpu:h100:8,nvme:1"}),
        ({"shell": {"ADDITIONAL_SLURM_PARAMS": "gres=nvme:1"}}, {"gpus-per-node": "8", "gres": "nvme:1"}),
        ({"shell": {"ADDITIONAL_SLURM_PARAMS": "gpus-per-node=h100:8"}}, {"gpus-per-node": "h100:8"}),
        ({"slurm_args": ("gres=",)}, {}),
        ({"slurm_args": ("gres=gpu:²",), "shell": {"GPUS_PER_NODE": "1"}}, {"gres": "gpu:²"}),
        ({"config": GRES}, {"gres": "nvme:1,gpu:h100:8"}),
        ({"config": {"slurm": {"gpu_request": "none"}}, "flags": {"gres": "gpu:8"}}, {"gres": "gpu:8"}),
    ],
)
def test_gpus_are_requested_as_the_nearest_layer_does(given: dict[str, object], requested: dict[str, str]) -> None:
    flags = job_of(order_of(LLAMA, **given)).flags
    assert {name: flags[name] for name in ("gpus-per-node", "gres") if name in flags} == requested
    assert flags["nodes"] == str(16 // int(given.get("shell", {}).get("GPUS_PER_NODE", 8)))
    assert flags["exclusive"] is None


@pytest.mark.parametrize("gres", ["gpu:4", "gpu:h100:4", "gpu", "gpu:0"])
def test_a_request_of_too_few_gpus_is_rejected(gres: str) -> None:
    with pytest.raises(UsageError, match=f"gres={gres} requests fewer than the job's 8 GPUs per node"):
        job_of(order_of(LLAMA, flags={"gres": gres}))


def test_a_job_on_cpus_keeps_the_generic_resources_that_it_is_given() -> None:
    tiny = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=4)
    assert job_of(order_of(tiny, shell={"GPUS_PER_NODE": "4"}, flags={"gres": "nvme:1"})).flags["gres"] == "nvme:1"
    assert "gres" not in job_of(order_of(tiny, shell={"GPUS_PER_NODE": "4"})).flags


@pytest.mark.parametrize("time", ["30", "30:00", "1:30:00", "2-0", "2-12:30", "2-12:30:00", "UNLIMITED"])
def test_every_form_of_a_time_is_taken(time: str) -> None:
    assert TIME.fullmatch(time)
    assert job_flags({"time": time}, (), {}) == {"time": time}


def test_all_that_is_wrong_with_the_settings_comes_at_once_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "cluster_config.yaml").write_text(
        "gpu_tpye: h100\n"
        "environment: {HF_TOKEN: hf_x, 'A B': x}\n"
        "slurm:\n"
        "  start: sideways\n"
        "  gpus_per_node: 0\n"
        "container: {runtime: pyxis}\n"
    )
    with pytest.raises(UsageError) as caught:
        read_cluster_file(tmp_path / "cluster_config.yaml", cluster_schema())
    text = str(caught.value)
    for part in ("yaml:1: gpu_tpye", "HF_TOKEN looks like a secret", "'A B' is not a valid", "yaml:4: slurm.start",
                 "yaml:5: slurm.gpus_per_node", "yaml:6: container", "pyxis requires an image"):  # fmt: skip
        assert part in text
    assert "hf_x" not in text


def test_flags_of_the_settings_may_be_numbers_and_truths() -> None:
    config = {"slurm": {"flags": {"nice": 5, "spread-job": True, "exclusive": False}}}
    flags = job_of(order_of(LLAMA, config=config)).flags
    assert flags["nice"] == "5"
    assert flags["spread-job"] is None
    assert "exclusive" not in flags


def test_without_settings_there_are_defaults(tmp_path: Path) -> None:
    assert read_cluster_file(tmp_path / "cluster_config.yaml", cluster_schema()).data == {}
    (tmp_path / "cluster_config.yaml").write_text("")
    assert read_cluster_file(tmp_path / "cluster_config.yaml", cluster_schema()).data == {}


def test_slurm_names_the_type_of_gpus_that_a_job_asked_for() -> None:
    assert shell_gpus_per_node({"SLURM_GPUS_PER_NODE": "h100:8"}) == 8
    assert shell_gpus_per_node({"SLURM_GPUS_PER_NODE": "null"}) is None
    assert shell_gpus_per_node({"GPUS_PER_NODE": "4", "SBATCH_GPUS_PER_NODE": "8"}) == 4
    with pytest.raises(UsageError, match="SLURM_GPUS_PER_NODE is 'h100:4,a100:4'"):
        shell_gpus_per_node({"SLURM_GPUS_PER_NODE": "h100:4,a100:4"})


SETTINGS = """\
slurm:
  account: research
  partition: hopper
  cpu_partition: cpu
  gpus_per_node: 8
  partitions:
    hopper: {gpu_type: h100}
    hopper-long: {gpu_type: h100}
    blackwell: {gpu_type: b200, gpu_request: gres, gres_type: b200}
    whole: {gpu_type: gb200, gpu_request: none, gpus_per_node: 4}
"""
LLAMA_WORDS = ("-w", "pretrain_llama3.1", "-s", "8b", "--scale", "16")


@pytest.fixture
def submitted(llmb: Run, tmp_path: Path) -> Run:
    """``llmb submit --dry-run``."""
    (tmp_path / "cluster_config.yaml").write_text(SETTINGS)
    return lambda *options, **variables: llmb("submit", *options, "--dry-run", **variables)


def asked(script: str) -> tuple[str, set[str]]:
    """The GPU type of a script, and what it requests of nodes, partitions and GPUs."""
    lines = script.splitlines()
    wanted = ("partition", "gres", "gpus-per-node", "nodes")
    flags = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")}
    return lines[1].rpartition(" x ")[2].split(",")[0], {flag for flag in flags if flag.partition("=")[0] in wanted}


@pytest.mark.parametrize(
    ("options", "variables", "gpu_type", "flags"),
    [
        ((), {}, "h100", {"nodes=2", "gpus-per-node=8", "partition=hopper"}),
        (("-p", "blackwell"), {}, "b200", {"nodes=2", "gres=gpu:b200:8", "partition=blackwell"}),
        ((), {"SBATCH_PARTITION": "blackwell"}, "b200", {"nodes=2", "gres=gpu:b200:8", "partition=blackwell"}),
        (("-p", "whole"), {}, "gb200", {"nodes=4", "partition=whole"}),
        (("--gpu-type", "gb200"), {}, "gb200", {"nodes=4", "partition=whole"}),
        (("-p", "hopper-long,hopper"), {}, "h100", {"nodes=2", "gpus-per-node=8", "partition=hopper-long,hopper"}),
        (("-p", "unlisted", "--gpu-type", "b300"), {}, "b300", {"nodes=2", "gpus-per-node=8", "partition=unlisted"}),
        (("--gpu-request", "none"), {}, "h100", {"nodes=2", "partition=hopper"}),
        ((), {"SBATCH_GPUS_PER_NODE": "null"}, "h100", {"nodes=2", "partition=hopper"}),
        (("-p", "whole", "--gpu-request", "gres"), {}, "gb200", {"nodes=4", "gres=gpu:4", "partition=whole"}),
    ],
)
def test_a_partition_decides_what_is_requested(
    submitted: Run, options: tuple[str, ...], variables: dict[str, str], gpu_type: str, flags: set[str]
) -> None:
    done = submitted(*LLAMA_WORDS, *options, **variables)
    assert done.returncode == 0, done.stderr
    assert asked(done.stdout) == (gpu_type, flags)


def test_a_gpu_type_decides_between_the_partitions_of_the_settings(submitted: Run, tmp_path: Path) -> None:
    (tmp_path / "cluster_config.yaml").write_text(SETTINGS.replace("partition: hopper", "partition: hopper,blackwell"))
    assert "pass partitions of one type with -p or, if the command has it, --gpu-type" in submitted(*LLAMA_WORDS).stderr
    assert "partition=hopper" in asked(submitted(*LLAMA_WORDS, "--gpu-type", "h100").stdout)[1]
    assert "gres=gpu:b200:8" in asked(submitted(*LLAMA_WORDS, "--gpu-type", "b200").stdout)[1]


def test_a_run_without_gpus_goes_to_the_partition_for_those(submitted: Run) -> None:
    done = submitted("-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "2", "--gpu-type", "cpu")
    assert asked(done.stdout)[1] == {"nodes=1", "partition=cpu"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-p", "blackwell", "--gpu-type", "h100"), ("has b200", "--partition hopper, --partition hopper-long")),
        (("-p", "hopper", "--gpu-type", "b300"), ("hopper has h100", "--gpu-type h100", "add the partition with b300")),
        (("--gpu-type", "b300"), ("hopper has h100", "--gpu-type h100")),
        (("-p", "hopper,blackwell"), ("hopper has h100, blackwell has b200", "partitions of one type")),
    ],
)
def test_gpus_that_the_partition_lacks_are_refused(
    submitted: Run, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = submitted(*LLAMA_WORDS, *options)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr


def test_a_campaign_gets_the_gpu_type_of_its_partition(submitted: Run) -> None:
    done = submitted("-w", "pretrain_llama3.1", "-s", "8b,70b", "--max-scale", "64", "-p", "blackwell")
    assert done.returncode == 0, done.stderr
    assert "b200" in done.stdout
    assert "h100" not in done.stdout


def test_the_sites_gpu_type_holds_where_the_partition_tells_none() -> None:
    config = cluster_schema().model_validate({"gpu_type": "b300", "slurm": {"partition": "any"}})
    site, scheduler = Site(install=Path("/x"), config=config), SlurmScheduler()
    assert scheduler.defaults(site, JobOptions()).gpu_type == "b300"
    assert scheduler.defaults(site, JobOptions(), "h100").gpu_type == "h100"
