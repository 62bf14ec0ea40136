# SPDX-License-Identifier: Apache-2.0
"""Batch scripts for Megatron-Bridge, as kept in golden/ (``make golden`` writes them anew), and what it cannot run."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from itertools import accumulate, islice
from pathlib import Path

import pytest
from slurm_values import CATALOGUE, INSTALL, PYTHON, folder_of, job_of, script_of

from llmb.base.errors import UsageError
from llmb.base.missing import Missing
from llmb.catalogue.bridge_figures import PublishedFigure
from llmb.catalogue.records import Lora
from llmb.catalogue.resolve import Overrides, Request
from llmb.cli.main import app, exit_code_of
from llmb.jobs.finish import finish_job
from llmb.jobs.order import Order, make_order
from llmb.launch.jobspec.job_options import ContainerSettings, FrameworkOptions, JobOptions
from llmb.launch.jobspec.spec import write_spec
from llmb.launch.programs.conclude import stored_run
from llmb.launch.programs.megatron_bridge.versions import BridgeVersion, bridge_data
from llmb.launch.programs.port import requested_container
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.site.site import Site
from llmb.launch.slurm.script import worker_step
from llmb.readers.samples.node_settings import NodeSettings
from llmb.readers.samples.sample_records import (
    CounterReading,
    GpuSamples,
    HostSample,
    Line,
    Sample,
    SampledGpu,
    SamplerStart,
    to_line,
)
from llmb.runs.checkpoints.prepared_data import prepared_folders
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.profiling import Profiling
from llmb.runs.record import queued_record, read_record, write_record

GOLDEN = Path(__file__).with_name("golden")
CONTAINER = {"runtime": "pyxis", "image": "/images/llmb.sqsh", "mounts": ["/datasets"]}
RECIPE_LORA = Lora(rank=16, alpha=32, dropout=0, targets="qkv")
LORA = {"workload": "finetune_llama3", "size": "70b"}
LLAMA = {"workload": "pretrain_llama3.1"}
MAVERICK = {"workload": "finetune_llama4-maverick", "size": "400b"}


def order_of(
    request: Request,
    choices: Choices | None = None,
    container: dict[str, object] | None = None,
    install: Path = INSTALL,
    **options: object,
) -> Order:
    settings = {"slurm": {"account": "research", "partition": "batch"}, "container": container or CONTAINER}
    site = Site(install=install, config=cluster_schema().model_validate(settings))
    framework = FrameworkOptions(framework="megatron_bridge", **options)
    return make_order(CATALOGUE, request, choices or Choices(), JobOptions(python=PYTHON), site, framework)


def concluded(tmp_path: Path, log: str, choices: Choices | None = None, **asked: object) -> tuple[Order, RunFolder]:
    """A job of LoRA's that has ended, and left this log; nobody has looked at it."""
    request = Request(**{**LORA, "gpu_type": "b200", "scale": 8, **asked})
    order = order_of(request, choices, install=tmp_path)
    folder = folder_of(order)
    folder.path.mkdir(parents=True)
    write_spec(folder, order.sample())
    folder.log.write_text(log)
    write_record(folder, queued_record(order.plan, ("sbatch",), program=order.program))
    return order, folder


Make = Callable[[], Order]
CASES: dict[str, Make] = {
    "lora-70b-fp8-8-b200": lambda: order_of(Request(**LORA, dtype="fp8", gpu_type="b200", scale=8)),
    "405b-fp8-1024-h100": lambda: order_of(
        Request(**LLAMA, size="405b", dtype="fp8", gpu_type="h100", scale=1024), Choices(save_checkpoint=True, seed=7)
    ),
    "70b-64-gb200-apptainer": lambda: order_of(
        Request(**LLAMA, size="70b", gpu_type="gb200", scale=64, overrides=Overrides(vp=1)),
        Choices(steps=20, peak_lr=1e-4, checkpoint_interval=10, checkpoint_dir="/checkpoints"),
        {"runtime": "apptainer", "image": "/images/llmb.sif"},
        arguments={"data": "rp2", "dataset_paths": "it's $(here)"},
        mounts=("/datasets/rp2",),
    ),
}


CASES["qwen3-8b-16-h100"] = lambda: order_of(
    Request(workload="pretrain_qwen3", size="8b", gpu_type="h100", scale=16),
    Choices(steps=8),
    image="/images/bridge-0.6.sqsh",
)
PUBLISHED = {
    "gpt-oss-120b-64-h100": ("pretrain_gpt_oss", "120b", "bf16", "h100", 64),
    "qwen3-235b-mxfp8-256-b200": ("pretrain_qwen3", "235b", "mxfp8", "b200", 256),
    "405b-nvfp4-256-gb200": ("pretrain_llama3.1", "405b", "nvfp4", "gb200", 256),
    "deepseek-v3-mxfp8-256-gb300": ("pretrain_deepseek-v3", "671b", "mxfp8", "gb300", 256),
}
"""Rows of Megatron-Bridge's tables, the newest of each."""


def published(workload: str, size: str, dtype: str, gpu_type: str, scale: int, **more: object) -> Request:
    return Request(workload=workload, size=size, dtype=dtype, gpu_type=gpu_type, scale=scale, **more)


CASES |= {name: lambda row=row: order_of(published(*row)) for name, row in PUBLISHED.items()}


@pytest.mark.parametrize("name", CASES)
def test_batch_scripts_are_as_kept(name: str) -> None:
    order = CASES[name]()
    script = script_of(order)
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("LLMB_GOLDEN"):
        path.write_text(script)
    assert script == path.read_text(), "read the difference, then 'make golden'"
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_argument_is_one_word_of_the_command() -> None:
    order = CASES["70b-64-gb200-apptainer"]()
    words = [str(word) for word in worker_step(job_of(order))]
    assert words[words.index("--dataset_paths") + 1] == "it's $(here)"
    assert shlex.quote("it's $(here)") in script_of(order)
    assert words[words.index("--virtual_pipeline_model_parallel_size") + 1] == "None"
    assert words[words.index("--data") + 1] == "rp2"


def test_everything_that_cannot_be_is_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"have no finetune_llama4-maverick 400b; they have pretrain_llama3\.1 8b"):
        order_of(Request(**MAVERICK, gpu_type="h100", scale=256))
    choices = Choices(recompute="full", load_checkpoint="/old", fp8_recipe="delayed")
    with pytest.raises(UsageError) as caught:
        order_of(Request(**LLAMA, size="8b", gpu_type="h200", scale=1), choices)
    told = caught.value.what
    for words in (
        "not tuned for h200",
        "llmb's proxies",
        "--recompute is set",
        "--load-checkpoint is set",
        "--fp8-recipe is delayed",
    ):
        assert words in told
    with pytest.raises(UsageError, match="it does not support fp32"):
        order_of(Request(**LLAMA, size="tiny", gpu_type="h100", dtype="fp32", scale=1))


def test_the_framework_needs_a_container_whose_image_may_be_the_users_own() -> None:
    with pytest.raises(UsageError, match="requires a container, but this cluster's settings have none"):
        order_of(Request(**LORA, gpu_type="b200", scale=8), container={"runtime": "none"})
    order = order_of(Request(**LORA, gpu_type="b200", scale=8), image="/images/nemo.sqsh")
    assert "--container-image=/images/nemo.sqsh" in worker_step(job_of(order))
    plain = order_of(Request(**LORA, gpu_type="b200", scale=8))
    assert f"--container-image={bridge_data().images['pyxis']}26.04.01" in worker_step(job_of(plain))


@pytest.mark.parametrize(
    ("image", "refused"),
    [
        ("nvcr.io#nvidia/nemo:25.09.00", "25.09"),
        ("/images/nvidia+nemo+25.04.01.sqsh", "25.04.01"),
        ("/images/nvidia+nemo+24.09.sqsh", "24.09"),
        ("nvcr.io/nvidia/nemo:26.02.01", "26.02.01"),
        ("nvcr.io/nvidia/nemo:26.10", "26.10"),
        ("/images/nvidia+nemo+26.04.01.sqsh", None),
        ("/images/our-nemo.sqsh", None),
    ],
)
def test_an_image_of_the_reference_suites_own_scripts_is_refused_before_it_is_queued(
    image: str, refused: str | None
) -> None:
    request = Request(**LORA, gpu_type="b200", scale=8)
    if refused is None:
        assert f"--container-image={image}" in worker_step(job_of(order_of(request, image=image)))
        return
    with pytest.raises(
        UsageError, match=f"NeMo {refused} has no version of megatron_bridge that llmb supports"
    ) as caught:
        order_of(request, image=image)
    assert caught.value.choices == ("NeMo 26.04 (0.4)", "NeMo 26.06 (0.5)", "NeMo 26.08 (0.6)")
    assert caught.value.do == "pass --image with one of these versions, or omit --image"


def test_an_image_for_the_engine_needs_a_container_too() -> None:
    with pytest.raises(UsageError, match="require a container"):
        requested_container(FrameworkOptions(image="/x.sqsh"), ContainerSettings())
    site = Site(install=INSTALL, config=cluster_schema()())
    request, asked = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=8), {"data": "mock"}
    with pytest.raises(UsageError, match="--framework-arg requires --framework"):
        make_order(CATALOGUE, request, Choices(), JobOptions(), site, FrameworkOptions(arguments=asked))
    chosen = requested_container(FrameworkOptions(image="/x.sqsh", mounts=("/y",)), ContainerSettings(**CONTAINER))
    assert (chosen.image, chosen.mounts) == ("/x.sqsh", ("/datasets", "/y"))


REPOSITORY = "LLMB_BRIDGE_REPOSITORY"
"""Variable that names a clone of Megatron-Bridge, with its tags."""
# Its parser takes the default of one argument from NeMo-Run.
PARSE = """import json, sys, types
home = types.ModuleType("nemo_run.config")
home.get_nemorun_home = lambda: "/"
sys.modules |= {"nemo_run": types.ModuleType("nemo_run"), "nemo_run.config": home}
from argument_parser import parse_cli_args
known, rest = parse_cli_args().parse_known_args(sys.argv[1:])
print(json.dumps([known.task, known.num_gpus, known.global_batch_size, rest]))
"""


@pytest.mark.parametrize("version", bridge_data().versions, ids=lambda version: version.tag)
def test_each_versions_own_parser_takes_the_arguments(
    tmp_path: Path, needs: Callable[[str, bool, str], None], version: BridgeVersion
) -> None:
    clone = os.environ.get(REPOSITORY, "")
    needs("bridge", bool(clone), f"{REPOSITORY} names no clone of https://github.com/NVIDIA-NeMo/Megatron-Bridge")
    show = ["git", "-C", clone, "show", f"{version.tag}:scripts/performance/argument_parser.py"]
    (tmp_path / "argument_parser.py").write_bytes(subprocess.run(show, capture_output=True, check=True).stdout)
    put_programs(tmp_path, numactl='shift 4; exec "$PARSER" -c "$PARSE" "$@"')
    info = tmp_path / "package_info.py"
    major, minor = version.version.split(".")
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\n")
    environ = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "LOCAL_RANK": "0", "PYTHONPATH": str(tmp_path)}
    environ |= {"PARSER": sys.executable, "PARSE": PARSE}
    for name, make in CASES.items():
        text, *more = process_words(order := make(), info)
        command = ["bash", "-c", text, *more]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if f"{version.version}) " not in text:
            needs_other = r"this job needs 0\.\d for \w+|llmb supports 0\.5 and 0\.6 for qwen3_8b"
            this = f"llmb: this image has megatron_bridge {version.version}"
            assert re.fullmatch(f"{re.escape(this)}, and ({needs_other})\n", done.stderr)
            continue
        assert done.returncode == 0, done.stderr
        task, gpus, gbs, rest = json.loads(done.stdout)
        assert task == version.tasks.get(tuned := "lora" if "lora" in name else "pretrain", tuned)
        assert (gpus, gbs) == (order.plan.recipe.scale, order.plan.recipe.layout.gbs)
        assert all("=" in word and not word.startswith("-") for word in rest), "overrides are for the configuration"


# The script's own configuration for the words of each job, one line of JSON for each.
CONFIGURE = """import json, sys
from pathlib import Path
from read_bridge_recipes import Script, cells
script = Script(Path(sys.argv[1]))
for words in json.load(sys.stdin):
    print(json.dumps(cells(script.configured(words))))
"""


def runnable() -> list[PublishedFigure]:
    """The rows of the tables whose models are described, of releases with a supported version."""
    undescribed = CATALOGUE.undescribed
    rows = [figure for figure in CATALOGUE.bridge.figures if figure.size not in undescribed.get(figure.workload, ())]
    return [figure for figure in rows if figure.expectation.release != "mb-25.09"]


def request_of(figure: PublishedFigure) -> Request:
    release, overrides = figure.expectation.release, Overrides(gbs=figure.sizes["gbs"])
    row = (figure.workload, figure.size, figure.dtype, figure.gpu_type or "", figure.gpus)
    return published(*row, release=release, overrides=overrides)


def test_every_published_row_is_a_job_with_the_scripts_own_recipe() -> None:
    assert len(runnable()) == 159
    for figure in runnable():
        order, release = order_of(request_of(figure)), figure.expectation.release.removeprefix("mb-")
        words = words_of(order)
        assert f"--container-image=nvcr.io#nvidia/nemo:{release}" in words
        assert order.plan.documented_software == f"Megatron-Bridge {release}"
        assert {word for word in words if word.endswith("_size")} == {"--global_batch_size"}
        assert not [word for word in words if word.startswith("model.")]


@pytest.mark.parametrize(("release", "tag"), CATALOGUE.bridge.file.versions.items())
def test_the_script_configures_the_layout_of_every_published_row(
    tmp_path: Path, needs: Callable[[str, bool, str], None], release: str, tag: str
) -> None:
    clone = os.environ.get(REPOSITORY, "")
    needs("bridge", bool(clone), f"{REPOSITORY} names no clone of https://github.com/NVIDIA-NeMo/Megatron-Bridge")
    archive = f"git -C {shlex.quote(clone)} archive {tag} scripts src/megatron/bridge | tar x -C {tmp_path}"
    subprocess.run(["bash", "-c", archive], check=True)
    rows = [figure for figure in runnable() if figure.expectation.release == f"mb-{release}"]
    version = next(one for one in bridge_data().versions if release.startswith(one.nemo))
    commands = []
    for figure in rows:
        words = words_of(order_of(request_of(figure)))
        given = words[words.index("--model_family_name") :]
        commands.append([version.tasks.get(word, word) for word in given])
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / "scripts")}
    command = [sys.executable, "-c", CONFIGURE, str(tmp_path)]
    done = subprocess.run(command, env=environ, input=json.dumps(commands), capture_output=True, text=True, check=True)
    configured = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for figure, cells in zip(rows, configured, strict=True):
        sizes = {name: cells[name] or 1 for name in ("tp", "pp", "cp", "vp", "mbs", "gbs")}
        assert sizes == {name: figure.sizes.get(name, 1) for name in sizes}, figure.title


@pytest.mark.parametrize(
    ("row", "more", "image", "told"),
    [
        (
            ("pretrain_deepseek-v3", "671b", "mxfp8", "gb300", 256),
            {"overrides": Overrides(tp=2)},
            "nvcr.io#nvidia/nemo:26.06",
            r"its layout of deepseek_v3 is TP 1, PP 2, VP 8, CP 1, EP 32, ETP 1; only NeMo 26\.08 supports",
        ),
        (
            ("pretrain_deepseek-v3", "671b", "mxfp8", "b300", 256),
            {},
            "nvcr.io#nvidia/nemo:26.08",
            "PP 8 and VP 1: its recipe fixes the layers of each stage, for TP 1, PP 8, VP 2",
        ),
        (
            ("pretrain_qwen3", "30b", "mxfp8", "gb300", 8),
            {"overrides": Overrides(layers=12)},
            None,
            "--layers 12: its recipes for models with experts always have all layers",
        ),
        (
            ("sft_llama3", "70b", "fp8", "b200", 1),
            {},
            "/images/nvidia+nemo+26.06.01.sqsh",
            r"NeMo 26\.06\.01 has no sft recipe llama3_70b for b200 in fp8; it has h100 in bf16, fp8; gb200 in",
        ),
    ],
)
def test_what_the_script_of_an_image_has_not_is_refused_by_name(
    row: tuple[str, str, str, str, int], more: dict[str, object], image: str | None, told: str
) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        order_of(published(*row, **more), image=image)
    other = "omit --framework to use llmb's own engine" if "sft" in row[0] else "the layout, --release or --image"
    assert caught.value.do == f"change these, or {other}"


def test_an_image_of_an_unknown_version_has_to_be_the_releases_for_experts() -> None:
    words = words_of(order_of(published(*PUBLISHED["deepseek-v3-mxfp8-256-gb300"]), image="/images/ours.sqsh"))
    assert "this job needs 0.6 for deepseek_v3" in next(word for word in words if "MAJOR" in word)


def test_only_what_differs_from_the_scripts_recipe_is_passed() -> None:
    row = ("pretrain_qwen3", "30b", "mxfp8", "gb300", 16)
    order = order_of(published(*row, overrides=Overrides(ep=16, seq_len=8192, gbs=1024)))
    words = words_of(order)
    sizes = {word: words[words.index(word) + 1] for word in words if word.endswith(("_size", "_length"))}
    ours = {"--expert_model_parallel_size": "16", "--global_batch_size": "1024", "--seq_length": "8192"}
    assert sizes == ours
    assert [word for word in words if word.startswith("model.")] == ["model.seq_length=8192"]
    assert order.plan.documented_software is None


def test_qwen3_is_of_the_library_of_newer_versions() -> None:
    request = Request(workload="pretrain_qwen3", size="8b", gpu_type="h100", scale=16)
    with pytest.raises(UsageError, match=r"qwen3_8b does not run in megatron_bridge 0\.4, which the default image"):
        order_of(request)
    with pytest.raises(UsageError, match="its library of models, which supports only bf16"):
        order_of(replace(request, dtype="fp8"), image="/images/bridge-0.6.sqsh")
    words = words_of(CASES["qwen3-8b-16-h100"]())
    assert {"checkpoint.save=null", "checkpoint.load=null", "scheduler.lr_warmup_iters=7"} <= {*words}
    with pytest.raises(UsageError, match="its scripts have no pretrain_mixtral 8x7b; they have"):
        order_of(Request(workload="pretrain_mixtral", size="8x7b", gpu_type="h100", scale=64))


def test_newer_dtypes_have_the_scripts_names_and_a_prediction() -> None:
    for dtype, name in (("mxfp8", "fp8_mx"), ("nvfp4", "nvfp4")):
        order = order_of(Request(**LLAMA, size="70b", dtype=dtype, gpu_type="gb300", scale=64))
        assert (order.plan.recipe.release, order.plan.fp8_recipe) == ("mb-26.04.01", None)
        assert order.plan.predicted and f"products {dtype}" in order.plan.predicted.breakdown_s
        words = words_of(order)
        assert words[words.index("--compute_dtype") + 1] == name


def put_programs(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def process_words(order: Order, info: Path) -> list[str]:
    """What bash is given to run in a process, its text first, where the container's file of its version is ``info``."""
    words = words_of(order)
    text, *more = words[words.index("bash") + 2 :]
    return [text.replace(bridge_data().package_info, str(info)), *more]


@pytest.mark.parametrize(
    ("major", "minor", "supported"),
    [(0, 4, True), (0, 5, True), (0, 6, True), (0, 7, False), (0, 3, False), (1, 4, False)],
)
def test_another_version_is_refused_where_it_is_found(tmp_path: Path, major: int, minor: int, supported: bool) -> None:
    """Only the container has the version: the words of a process are run as there, with a numactl that is none."""
    info = tmp_path / "package_info.py"
    info.write_text(
        f'# Copyright\n\nMAJOR = {major}\nMINOR = {minor}\nPATCH = 2\nPRE_RELEASE = ""\nVERSION = (MAJOR,)\n'
    )
    put_programs(tmp_path, numactl='shift 2; echo "$@"; printenv NCCL_NVLS_ENABLE TRANSFORMERS_OFFLINE NCCL_DEBUG')
    order = CASES["lora-70b-fp8-8-b200"]()
    text, *more = process_words(order, info)
    own = {"NCCL_NVLS_ENABLE": "0", "TRANSFORMERS_OFFLINE": "1", "NCCL_DEBUG": "WARN"}
    environ = {**os.environ, **own, "PATH": f"{tmp_path}:/usr/bin:/bin", "LOCAL_RANK": "5"}
    command = ["bash", "-c", text, *more[:9]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    given = "--model_family_name llama --model_recipe_name llama3_70b --task"
    if supported and minor < 6:
        assert done.stderr == ""
        assert done.stdout == f"python {bridge_data().script} {given} lora\n0\n1\nWARN\n"
    elif supported:
        script = "/opt/Megatron-Bridge/scripts/performance/bootstrap.py"
        assert done.stdout == f"python {script} {given} peft\n1\nWARN\n", "it sets NCCL_NVLS_ENABLE itself"
    else:
        assert done.returncode == 2
        expected = f"llmb: this image has megatron_bridge {major}.{minor}, and llmb supports 0.4, 0.5 and 0.6 "
        assert done.stderr == f"{expected}for llama3_70b\n"
    info.unlink()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "this image has megatron_bridge of an unknown version, and llmb" in done.stderr


def profiled(profiler: str, **profiling: object) -> Order:
    choices = Choices(profiling=Profiling(profile=True, profiler=profiler, **profiling))
    return order_of(Request(**LORA, gpu_type="b200", scale=16), choices)


def words_of(order: Order) -> list[str]:
    return [str(word) for word in worker_step(job_of(order))]


OVERRIDES = ["start=45", "end=50", "ranks=[0,1,2,3,4,5,6,7]"]


@pytest.mark.parametrize(
    ("profiler", "named", "own"),
    [
        ("auto", "nsys", []),
        ("nsys", "nsys", []),
        (
            "torch",
            "pytorch",
            ["profiling.record_memory_history=false", 'logger.tensorboard_dir="$llmb_folder"/tensorboard'],
        ),
    ],
)
def test_the_script_is_told_what_its_launchers_plugins_would_tell_it(profiler: str, named: str, own: list[str]) -> None:
    """perf_plugins.py of v0.4.2 and v0.5.1; traces are then beside the folder of TensorBoard, as the engine's are."""
    order = profiled(profiler)
    words = words_of(order)
    told = words[words.index(f"profiling.use_{named}_profiler=true") :]
    steps = [word.removeprefix("profiling.profile_").replace("step_", "") for word in told[1:4]]
    assert steps == OVERRIDES
    assert told[4:] == ["profiling.record_shapes=false", *own]
    assert order.plan.window.last < 45, "profiled steps are slower"


@pytest.mark.parametrize(
    ("rank", "has_nsys", "profiling", "asked"),
    [
        (0, True, {}, "profile_933609_node1_rank0"),
        (7, True, {}, "profile_933609_node1_rank7"),
        (8, True, {}, None),
        (9, True, {"profile_ranks": "1,9"}, "profile_933609_node1_rank9"),
        (1, True, {"profile_ranks": "9,11"}, None),
        (0, False, {}, None),
    ],
)
def test_profiled_ranks_run_under_nsight_systems(
    tmp_path: Path, rank: int, has_nsys: bool, profiling: dict[str, object], asked: str | None
) -> None:
    """The words of a process are run as in the container, with programs that print their arguments."""
    info = tmp_path / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 5\n")
    nsys = {"nsys": 'echo "nsys $*"'} if has_nsys else {}
    put_programs(tmp_path, numactl='shift 2; exec "$@"', python='echo "python $*"', **nsys)
    text, name, _, *more = process_words(profiled("nsys", **profiling), info)
    folder = tmp_path / "with space" / "nsys_profile"
    command = ["bash", "-c", text, name, str(folder), *more[:2]]
    ids = {"RANK": str(rank), "LOCAL_RANK": "5", "SLURM_JOB_ID": "933609", "SLURM_NODEID": "1"}
    environ = {**os.environ, **ids, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    plain = f"python {bridge_data().script}"
    *notes, last = done.stdout.splitlines()
    if asked:
        assert last.startswith("nsys profile ")
        assert last.endswith(f"--output={folder}/{asked} {plain}")
        assert folder.is_dir()
    else:
        assert last == plain
        assert notes == ([] if has_nsys else [f"llmb: rank {rank} is not profiled: there is no nsys in this image"])


def test_what_cannot_be_profiled_is_refused() -> None:
    with pytest.raises(UsageError, match="--nccl-trace is set, which llmb does not pass to the script"):
        order_of(Request(**LORA, gpu_type="b200", scale=8), Choices(profiling=Profiling(nccl_trace=True)))
    with pytest.raises(UsageError, match="--profile-ranks contains rank 16, but the run's last rank is 15"):
        profiled("nsys", profile_ranks="16")
    with pytest.raises(UsageError, match="--profile-gpu-metrics needs Nsight Systems"):
        profiled("torch", profile_gpu_metrics=True)


@pytest.mark.parametrize(
    ("profiling", "figures"),
    [
        ({}, 10),
        ({"profile_start_step": 40}, 6),
        ({"profile_start_step": 38}, "6 of the 10 steps of the window were profiled, which slows them down"),
        ({"profile_start_step": 40, "profile_stop_step": 43}, "3 of the 10 steps of the window were profiled, which"),
    ],
)
def test_profiled_steps_give_no_figures(tmp_path: Path, profiling: dict[str, object], figures: int | str) -> None:
    choices = Choices(steps=50, profiling=Profiling(profile=True, profiler="torch", **profiling))
    _, folder = concluded(tmp_path, iterations(50), choices)
    folder.torch_profile.mkdir()
    (folder.torch_profile / "rank-1.json.gz").write_bytes(b"not a trace")
    result = finish_job(folder, 0, "")
    assert result.status == "success"
    assert result.resources == Missing("no llmb sampler ran during the run")
    times = result.step_time_s
    assert times.reason.startswith(str(figures)) if isinstance(times, Missing) else times.count == figures
    assert result.profile
    assert result.profile.files == ("torch_profile/rank-1.json.gz",)
    assert "rank-0.json.gz, rank-2.json.gz" in result.profile.warnings[0]


def prepare_squad(install: Path) -> Path:
    """The files of preparation that the script reads; returns the folder of the samples."""
    folders = prepared_folders(install, "finetune_llama3")
    samples, context = folders.dataset("squad"), folders.model("meta-llama/Meta-Llama-3-70B") / "context"
    samples.mkdir(parents=True)
    context.mkdir(parents=True)
    line = json.dumps({"input": "Context: It rains. Question: What falls? Answer:", "output": "rain"}) + "\n"
    for split in ("training", "validation"):
        (samples / f"{split}.jsonl").write_text(line * 40)
    (context / "tokenizer.json").write_text("{}")
    return samples


def test_squad_is_taken_where_it_is_prepared(tmp_path: Path) -> None:
    request = Request(**LORA, gpu_type="b200", scale=8)
    plain = order_of(request, install=tmp_path)
    assert plain.plan.origin.text == "weights: random; data: synthetic mock data of Megatron-Bridge"
    samples = prepare_squad(tmp_path)
    order = order_of(request, install=tmp_path)
    assert order.plan.origin.text == "weights: random; data: SQuAD, packed by megatron_bridge to 4096"
    words = words_of(order)
    context = samples.parents[1] / "models" / "meta-llama" / "Meta-Llama-3-70B" / "context"
    given = {name: words[words.index(f"--{name}") + 1] for name in ("data", "dataset_root", "tokenizer_model")}
    assert given == {"data": "squad_packed", "dataset_root": str(samples), "tokenizer_model": str(context)}
    assert {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"} <= {item.name for item in job_of(order).variables}
    synthetic = order_of(request, Choices(synthetic=True), install=tmp_path)
    assert synthetic.plan.origin == plain.plan.origin
    assert words_of(synthetic)[words_of(synthetic).index("--data") + 1] == "mock"
    own = order_of(request, install=tmp_path, arguments={"data": "rp2", "pretrained_checkpoint": "/saved"})
    assert own.plan.origin.text == "weights: checkpoint /saved; data: rp2 of --framework-arg"
    named = order_of(request, install=tmp_path, arguments={"data": "squad_packed"})
    packed = [each.plan.recipe.packing is not None for each in (plain, order, synthetic, own, named)]
    assert packed == [False, True, False, False, True]
    assert str(samples) not in words_of(own)


def test_the_first_rank_finds_the_dataset_without_the_hub(tmp_path: Path) -> None:
    """``datasets`` itself, called in the process that the words start, as the script's builder calls it."""
    samples = prepare_squad(tmp_path)
    info = tmp_path / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 5\n")
    put_programs(tmp_path, numactl='shift 2; exec "$@"')
    text, name, _, folder, *_ = process_words(
        order_of(Request(**LORA, gpu_type="b200", scale=8), install=tmp_path), info
    )
    code = "from datasets import load_dataset as load\nfor name in ('squad', 'rajpurkar/squad'):\n"
    code += f"    found = load(name, name=None, cache_dir={str(samples)!r}, split=None)\n"
    code += "    print(sorted(found), found['train'].num_rows)\n"
    data = tmp_path / "with space" / "data"
    command = ["bash", "-c", text, name, str(data), folder, sys.executable, "-c", code]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {**os.environ, **offline, "PATH": path, "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["['train'] 40"] * 2, done.stderr
    other = subprocess.run([*command[:6], "pwd"], env={**environ, "RANK": "1"}, capture_output=True, text=True, cwd="/")
    assert other.stdout == "/\n", "only the first rank loads it"


def test_advice_on_lora_leads_somewhere() -> None:
    """The framework sends a recipe that it does not have to the engine, which trains it."""
    tiny = Request(workload="finetune_llama3", size="tiny", gpu_type="h100", scale=1)
    site = Site(install=INSTALL, config=cluster_schema()())
    with pytest.raises(UsageError) as caught:
        order_of(tiny)
    assert caught.value.do == "change these, or omit --framework to use llmb's own engine"
    assert make_order(CATALOGUE, tiny, Choices(synthetic=True), JobOptions(), site).plan.lora == RECIPE_LORA
    assert order_of(Request(**LORA, gpu_type="b200", scale=8)).plan.lora == RECIPE_LORA


def test_data_names_recipes_that_exist() -> None:
    for item in bridge_data().recipes:
        assert item.size in {table.size for table in CATALOGUE.workloads[item.workload].layouts}
    assert set(bridge_data().gpu_types) == set(bridge_data().gpus_per_numa_node) <= set(CATALOGUE.gpus)


def iterations(count: int, last: int = 50, norm: str = "1.0") -> str:
    return "".join(
        f" iteration {n}/ {last} | elapsed time per iteration (ms): {3000 + n}.0 | lm loss: 1.1E+01 |"
        f" grad norm: {norm} | number of nan iterations:   0 |\n"
        for n in range(1, count + 1)
    )


@pytest.mark.parametrize(
    ("steps", "norm", "code", "signal", "status", "reason"),
    [
        (50, "1.0", 0, "", "success", None),
        (50, "1.0", 139, "", "success", None),
        (20, "1.0", 1, "", "failed", "died after step 20 of 50; exit code 1"),
        (20, "1.0", 143, "TERM", "failed", "died after step 20 of 50; ended by Slurm"),
        (50, "nan", 0, "", "invalid", "the gradient norm is not finite from step 1"),
        (0, "", 1, "", "failed", "empty file; exit code 1"),
    ],
)
def test_a_run_is_judged_by_its_log(
    tmp_path: Path, steps: int, norm: str, code: int, signal: str, status: str, reason: str | None
) -> None:
    _, folder = concluded(tmp_path, iterations(steps, norm=norm))
    assert finish_job(folder, code, signal).status == status
    record = read_record(folder)
    assert (record.status, record.exit_code) == (status, code)
    assert (record.reason or "").startswith(reason or "")
    assert bool(record.reason) == bool(reason)
    note = "exit code 139, after its last step" if code == 139 else None
    assert record.result and record.result.note == stored_run(folder, record)[0].note == note
    assert json.loads(folder.record.read_text())["ended_at"]


BEGAN_S = 1_800_000_000.0


def stamped_iterations(shift_s: float = 0.0) -> str:
    """With the whole seconds of a clock that is off by ``shift_s``."""
    ends = accumulate((3 + n / 1000 for n in range(1, 51)), initial=BEGAN_S + shift_s)
    stamps = (f" [{datetime.fromtimestamp(int(end)):%Y-%m-%d %H:%M:%S}]" for end in islice(ends, 1, None))
    return "".join(stamp + line for stamp, line in zip(stamps, iterations(50).splitlines(True), strict=True))


def write_samples(folder: RunFolder, gpus: int) -> None:
    """A node whose GPUs take 500 W, but 700 W from the 35th iteration to the 44th."""
    folder.resources.mkdir()
    known = tuple(SampledGpu(index=place, uuid=f"GPU-{place}") for place in range(gpus))
    lines: list[Line] = [SamplerStart(node="node1", cores=64, interval_s=1.0, gpus=known)]
    reading = CounterReading(read_at_s=BEGAN_S, counters={}, read=("gpu", "rdma"), unread={}, kernel=())
    lines.append(reading)
    for second in range(-20, 170):
        watts = 700.0 if 3 * 34 <= second <= 3 * 45 else 500.0
        own = GpuSamples(power_w=(watts,) * gpus, sm_clock_mhz=(1800.0,) * gpus)
        lines.append(Sample(time_s=BEGAN_S + second, host=HostSample(), gpus=own))
    lines.append(replace(reading, read_at_s=BEGAN_S + 170))
    (folder.resources / "node1.jsonl").write_bytes(b"".join(map(to_line, lines)))


@pytest.mark.parametrize(
    ("shift_s", "gpus", "reason"),
    [
        (0, 8, None),
        (3600, 8, "the clock of the log differs from that of the nodes, perhaps by a time zone"),
        (0, 9, "9 GPUs were sampled, but it is unknown which 8 of them trained"),
        (0, 4, None),
    ],
)
def test_power_is_that_of_the_steps_of_the_window(tmp_path: Path, shift_s: int, gpus: int, reason: str | None) -> None:
    _, folder = concluded(tmp_path, stamped_iterations(shift_s))
    write_samples(folder, gpus)
    result = finish_job(folder, 0, "")
    assert result.machine and result.machine.state == "clean"
    if reason:
        assert result.resources == Missing(reason)
        return
    used = result.resources
    assert used
    assert (used.power_w_mean, used.sm_clock_mhz_mean, used.throttled) == (700.0, 1800.0, None)
    whole = 8 * 700.0 * 10 * 3.0395
    assert used.energy_j == (pytest.approx(whole) if gpus == 8 else None)
    assert gpus == 8 or "not all GPUs and nodes were sampled" in used.reasons["energy_j"]


def test_what_samplers_read_of_their_nodes_tells_runs_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {}
    for name, swappiness in {"before": "1", "after": "60", "unsampled": None}.items():
        _, folders[name] = concluded(tmp_path / name, stamped_iterations())
        if swappiness:
            write_samples(folders[name], 8)
            values = {"sysctl.vm.swappiness": swappiness, "variables.NCCL_NVLS_ENABLE": "0"}
            read = NodeSettings(values=values, missing={})
            (folders[name].resources / "node1.settings.json").write_text(read.model_dump_json())
        finish_job(folders[name], 0, "")
    assert [*folders["after"].resources.glob("*.settings.json")] == [], "the record has them"
    assert read_record(folders["unsampled"]).settings == Missing("no llmb sampler ran during the run")
    differ = {}
    for other in ("after", "unsampled"):
        assert exit_code_of(app, ["compare", str(folders["before"].path), str(folders[other].path), "--json"]) in (0, 6)
        found = json.loads(capsys.readouterr().out)["differences"]
        differ[other] = {one["key"]: (one["before"], one["after"]) for one in found}
    assert differ["after"]["sysctl.vm.swappiness"] == ("1", "60")
    assert not [key for key in differ["unsampled"] if key.startswith(("sysctl.", "variables."))]


@pytest.mark.parametrize(
    ("rule", "window", "count", "mean_s"), [("reference", None, 10, 3.0033), ("auto", (4, 50), 47, None)]
)
def test_windows_are_in_the_numbers_of_the_log(
    tmp_path: Path, rule: str, window: tuple[int, int] | None, count: int, mean_s: float | None
) -> None:
    """The first three of 50 iterations take longer than the others, which are level."""
    level = re.sub(r"(?<=: )3\d+", lambda time: f"30{int(time[0]) * 5 % 7:02}", iterations(50))
    _, folder = concluded(tmp_path, re.sub("(?<=: )30", "60", level, count=3), Choices(window=rule))
    result = finish_job(folder, 0, "")
    assert (result.window and (result.window.first, result.window.last)) == window
    assert result.step_time_s
    assert result.step_time_s.count == count
    assert mean_s is None or result.step_time_s.mean == pytest.approx(mean_s)


def test_the_window_is_that_of_the_frameworks_own_parsers(tmp_path: Path) -> None:
    """They average the iterations that are printed as 35-44; iteration n took 3 + n/1000 s."""
    order, folder = concluded(tmp_path, iterations(50))
    result = finish_job(folder, 0, "")
    assert result.step_time_s
    assert (result.step_time_s.count, result.step_time_s.mean) == (10, pytest.approx(3.0395))
    assert (order.plan.window.first, order.plan.window.last) == (35, 44)


def test_a_run_of_the_published_recipe_differs_from_its_figure_in_nothing(tmp_path: Path) -> None:
    names = ("workload", "size", "dtype", "gpu_type", "scale")
    row = dict(zip(names, PUBLISHED["deepseek-v3-mxfp8-256-gb300"], strict=True))
    order, folder = concluded(tmp_path, "", **row)
    step_ms = 1000 * order.plan.recipe.expectations[0].step_time_s
    folder.log.write_text(re.sub(r"(?<=: )3\d+", lambda time: f"{step_ms + int(time[0]) % 5:.0f}", iterations(50)))
    verdict = finish_job(folder, 0, "").verdict
    assert verdict
    assert verdict.verdict == "pass", verdict.sentence
    assert [one.key for one in verdict.conditions if one.effect != "noted"] == []


@pytest.mark.parametrize(("seconds", "verdict", "code"), [(4, "pass", 0), (5, "regressed", 5)])
def test_its_run_is_judged_against_the_published_figure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: int,
    verdict: str,
    code: int,
) -> None:
    """The document averages the iterations that are printed as 35-44, too; iteration n took n ms more."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    log = iterations(50).replace("(ms): 3", f"(ms): {seconds}")
    order, folder = concluded(tmp_path, log, gpu_type="gb200", dtype="bf16")
    assert finish_job(folder, 0, "").status == "success"
    capsys.readouterr()
    assert exit_code_of(app, ["judge", str(folder.path), "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["soft"]) == (verdict, True)
    published = found["reference"]["step_time_s"]
    assert (found["reference"]["kind"], published) == ("published", order.plan.recipe.expectations[0].step_time_s)
    assert found["delta_pct"] == pytest.approx(100 * ((seconds + 0.0395) / published - 1))
    differs = {one["key"]: one["own"] for one in found["conditions"] if one["effect"] != "noted"}
    assert differs.pop("program") == "megatron_bridge", "the published figure is NeMo's"
    assert differs.keys() == {"data"}, "the window is the same"
