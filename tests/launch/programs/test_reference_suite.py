# SPDX-License-Identifier: Apache-2.0
"""The launch lines of the documents as llmb would call them, and what is refused before anything is queued."""

import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from small_suite import AS_RELEASED, SmallSuite, checked_out, nemo1_lines, nemo_lines, small_suite, write_image

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request
from llmb.catalogue.window import DEFAULT_RULE
from llmb.jobs.campaigns.proposal import job_options
from llmb.jobs.order import Order, make_order
from llmb.jobs.read_run import planned_window
from llmb.launch.documents.launch_scripts import check_checkout, image_problem, launch_scripts
from llmb.launch.documents.variables import read_launch
from llmb.launch.jobspec.job_options import FrameworkOptions, JobOptions
from llmb.launch.programs.foreign_log import judge_latest_attempt, result_of_log
from llmb.launch.programs.port import End
from llmb.launch.programs.reference_suite import other_batch
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.site.site import Site
from llmb.readers.logs.formats import format_called
from llmb.reports.plan_report import start_lines
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.planning import NotPrepared
from llmb.runs.profiling import Profiling
from llmb.runs.record import queued_record
from llmb.runs.result import Verdict
from llmb.verdict.published_verdict import with_verdict

CATALOGUE = Catalogue()
SETTINGS = {"slurm": {"account": "research", "partition": "batch", "gpu_request": "none"}}
ROOT = Path("/lustre/bench")
LLAMA = ("pretrain_llama3.1", "25.04", "h100")
NEMOTRON = ("pretrain_nemotron4", "25.04", "h100")
OLDEST = ("pretrain_llama3.1", "24.11", "h100")
MAVERICK = ("finetune_llama4-maverick", "25.07", "b200")
LORA = ("finetune_llama3", "25.12", "gb200")
# As the documents write them (000 line 182, 001 line 116, 002 line 164, 003 line 139, 004 line 198), with three scales.
NEMO_RUN = "DTYPE=fp8 MODEL_SIZE={size} JOB_TOTAL_GPUS={scale} GPUS_PER_NODE=8"
WITH_GPU_TYPE = "JOB_TOTAL_GPUS={scale} GPU_TYPE={gpu} DTYPE=fp8 MODEL_SIZE={size}"
LINES = [
    (OLDEST, "405b", (576, 1152, 2304), "DTYPE=fp8 MODEL_SIZE=405b"),
    (LLAMA, "8b", (8, 16, 128), NEMO_RUN),
    (LLAMA, "70b", (64, 512, 2048), NEMO_RUN),
    (LLAMA, "405b", (32, 512, 2048), NEMO_RUN),
    (NEMOTRON, "15b", (16, 64, 2048), NEMO_RUN),
    (NEMOTRON, "340b", (256, 512, 2048), NEMO_RUN),
    (MAVERICK, "400b", (256,), WITH_GPU_TYPE),
    (LORA, "70b", (8, 16, 32), WITH_GPU_TYPE),
]
PROFILED, TRACED = Choices(profiling=Profiling(profile=True)), Choices(profiling=Profiling(nccl_trace=True))


def order_of(
    recipe: tuple[str, str, str],
    size: str,
    scale: int,
    choices: Choices | None = None,
    *,
    dtype: str = "fp8",
    root: Path = ROOT,
    shell: Mapping[str, str] | None = None,
    options: JobOptions | None = None,
    dry_run: bool = True,
    overrides: Overrides | None = None,
    **framework: object,
) -> Order:
    workload, release, gpu_type = recipe
    request = Request(
        workload=workload, size=size, scale=scale, dtype=dtype, release=release, gpu_type=gpu_type,
        **({"overrides": overrides} if overrides else {}),
    )  # fmt: skip
    site = Site(install=root, config=cluster_schema().model_validate(SETTINGS), shell=shell or {})
    chosen = FrameworkOptions(framework="reference_suite", **framework)
    return make_order(CATALOGUE, request, choices or Choices(), options or JobOptions(), site, chosen, dry_run=dry_run)


def exported(text: str) -> dict[str, str]:
    words = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("export ")]
    return dict(word.split("=", 1) for _, *rest in words for word in rest if "=" in word)


@pytest.mark.parametrize(
    ("recipe", "size", "scale", "line"),
    [(recipe, size, scale, line) for recipe, size, scales, line in LINES for scale in scales],
)
def test_a_dry_run_shows_the_documents_launch_line(
    recipe: tuple[str, str, str], size: str, scale: int, line: str
) -> None:
    line = line.format(size=size, scale=scale, gpu=recipe[2])
    script = order_of(recipe, size, scale).script()
    found = exported(script)
    root = "STAGE_PATH" if recipe[1] in ("24.11", "25.04") else "LLMB_INSTALL"
    passing = {"SBATCH_ACCOUNT", "SBATCH_PARTITION", "VIRTUAL_ENV", "PATH"}
    assert {name: value for name, value in found.items() if name not in passing} == {
        root: str(ROOT),
        **dict(pair.split("=") for pair in line.split()),
    }
    call = script.splitlines()[-1].split(" >")[0]
    if recipe is OLDEST:
        assert call == f"sbatch -A research -p batch -N {scale // 8} ./launch.sh"
    else:
        assert (call, found["SBATCH_ACCOUNT"], found["SBATCH_PARTITION"]) == ("./launch.sh", "research", "batch")
    if recipe in (MAVERICK, LORA):
        assert "STAGE_PATH" not in found


@pytest.mark.parametrize(
    ("recipe", "size", "scale", "choices", "variables"),
    [
        (LLAMA, "70b", 64, PROFILED, {"ENABLE_PROFILE": "true", "DISABLE_PERFRUN": "true"}),
        (LLAMA, "8b", 16, TRACED, {"ENABLE_NCCLTRACE": "true", "DISABLE_PERFRUN": "true"}),
        (NEMOTRON, "15b", 16, Choices(save_checkpoint=True), {"ENABLE_CHECKPOINT": "true"}),
        (NEMOTRON, "15b", 64, Choices(load_checkpoint="/saved"), {"LOAD_CHECKPOINT_PATH": "/saved"}),
        (LORA, "70b", 8, Choices(steps=20), {"MAX_STEPS": "20"}),
        (LORA, "70b", 8, Choices(fp8_recipe="delayed"), {"FP8_RECIPE": "ds"}),
        (OLDEST, "405b", 576, PROFILED, {"ENABLE_PROFILE": "true", "MAX_STEPS": "30"}),
    ],
)  # fmt: skip
def test_options_become_the_scripts_variables(
    recipe: tuple[str, str, str], size: str, scale: int, choices: Choices, variables: dict[str, str]
) -> None:
    usual, found = (
        exported(order_of(recipe, size, scale).script()),
        exported(order_of(recipe, size, scale, choices).script()),
    )
    assert dict(found.items() - usual.items()) == variables


def test_what_the_shell_has_set_does_not_reach_the_script_unnoticed() -> None:
    script = order_of(MAVERICK, "400b", 256).script()
    (unset,) = [line.split()[1:] for line in script.splitlines() if line.startswith("unset ")]
    assert {"TP", "GBS", "CUDA_GRAPH", "MAX_STEPS", "STAGE_PATH"} <= set(unset)
    assert not {"HF_HOME", "HF_TOKEN", "DTYPE"} & set(unset)


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ("--seed|seed is set, which the script does not support", {"choices": Choices(seed=3)}),
        ("always have 25 steps", {"choices": Choices(steps=40, profiling=Profiling(profile=True))}),
        ("--tp has no corresponding variable", {"overrides": Overrides(tp=2)}),
        ("the script does not read NOTHING", {"arguments": {"nothing": "1"}}),
        ("pass --steps instead", {"arguments": {"max_steps": "1"}}),
        (
            "MAX_STEPS, set by --env or cluster_config.yaml, would change what",
            {"options": JobOptions(variables={"MAX_STEPS": "5"})},
        ),
        ("--nodelist cannot be passed to sbatch", {"options": JobOptions(flags={"nodelist": "node1"})}),
        ("--vboost is only supported for jobs that llmb starts itself", {"options": JobOptions(vboost=1)}),
    ],
)
def test_what_a_script_cannot_take_is_refused(said: str, arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError) as refused:
        order_of(LLAMA, "70b", 64, **arguments)
    assert any(part in str(refused.value) for part in said.split("|"))


@pytest.mark.parametrize(("recipe", "size", "scale"), [(OLDEST, "405b", 576), (NEMOTRON, "15b", 16)])
def test_nodes_that_are_not_those_written_into_a_script_are_refused(
    recipe: tuple[str, str, str], size: str, scale: int
) -> None:
    """24.11 would train on twice the GPUs, and Nemotron4 ask for half of the nodes."""
    assert order_of(recipe, size, scale, options=JobOptions(gpus_per_node=8)).script()
    with pytest.raises(UsageError, match="always uses 8 GPUs per node, but this job's nodes have 4"):
        order_of(recipe, size, scale, options=JobOptions(gpus_per_node=4))


def test_nodes_that_a_variable_says_are_those_of_the_user() -> None:
    assert exported(order_of(LLAMA, "8b", 8, options=JobOptions(gpus_per_node=4)).script())["GPUS_PER_NODE"] == "4"


@pytest.mark.parametrize(
    ("recipe", "size", "scale", "choices", "said"),
    [
        (LLAMA, "8b", 8, PROFILED, ("only the profiled run is queued (DISABLE_PERFRUN=true)",)),
        (LLAMA, "8b", 8, TRACED, ("only the traced run is queued (DISABLE_PERFRUN=true)",)),
        (LLAMA, "8b", 8, Choices(), ()),
        (NEMOTRON, "15b", 16, PROFILED, ()),
    ],
)
def test_a_profiled_run_says_that_no_plain_one_is_queued_beside_it(
    recipe: tuple[str, str, str], size: str, scale: int, choices: Choices, said: tuple[str, ...]
) -> None:
    lines = [line for line in start_lines(order_of(recipe, size, scale, choices).plan) if line.startswith("only the")]
    assert [line[: len(text)] for line, text in zip(lines, said, strict=True)] == list(said)


def test_a_checkpoint_that_the_script_cannot_load_is_named_before_a_job_is_queued(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    recipe = ("pretrain_nemotron4", "15b", "25.04")
    made = small_suite(tmp_path, root, recipe, "/usr/bin:/bin", programs=False)
    place = {"root": root, "shell": made.environ, "suite": str(made.checkout), "modified_suite": True}

    def said(checkpoint: Path, **shell: str) -> str:
        given = {**place, "shell": {**made.environ, **shell}}
        missing = order_of(NEMOTRON, "15b", 64, Choices(load_checkpoint=str(checkpoint)), **given).missing
        return missing.what if missing else "nothing"

    for folder in (root / "saved", elsewhere / "saved"):
        (folder / "weights").mkdir(parents=True)
    assert f"{root}/saved has no weights/*.distcp" in said(root / "saved")
    for folder in (root / "saved", elsewhere / "saved"):
        (folder / "weights" / "__0_0.distcp").touch()
    (root / "link").symlink_to(elsewhere / "saved")
    assert f"{root}/saved/weights has no weights/*.distcp" in said(root / "saved" / "weights")
    for outside in (elsewhere / "saved", root / "link"):
        assert f"{outside} is not in the container, which mounts only {root}" in said(outside)
        assert said(outside, NEMO_HOME=str(elsewhere)) == "nothing"
    assert said(root / "saved") == "nothing"


def test_a_release_without_the_recipe_is_refused() -> None:
    with pytest.raises(UsageError, match="no launch script for pretrain_qwen3"):
        order_of(("pretrain_qwen3", None, "h100"), "8b", 1, dtype="bf16")


def test_an_image_and_mounts_that_the_script_does_not_read_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--image has no corresponding variable in the script\n.*--mounts has no"):
        order_of(NEMOTRON, "15b", 64, image="other.sqsh", mounts=("/a:/b",))
    pinned = order_of(LORA, "70b", 8, arguments={"enable_vboost": "true"})
    assert exported(pinned.script())["ENABLE_VBOOST"] == "true", "llmb's own option is refused for such jobs"


def test_variables_that_only_the_script_reads_are_handed_to_it() -> None:
    environ = {"DTYPE": "fp8", "JOB_TOTAL_GPUS": "256", "CUDA_GRAPH": "false", "HF_HOME": "/hub", "GPU_TYPE": "b200"}
    framework = {"framework": "reference_suite"}
    found = read_launch(CATALOGUE, job_options(), environ, "finetune_llama4-maverick", framework, {})
    assert (found.values["framework_arg"], found.values["dtype"], found.notes) == (["cuda_graph=false"], "fp8", ())
    order = order_of(MAVERICK, "400b", 256, arguments={"cuda_graph": "false"})
    assert exported(order.script())["CUDA_GRAPH"] == "false"
    assert order.plan.documented_software is None


def test_a_variable_of_another_releases_script_is_not_needed() -> None:
    """25.04 reads it, and the same shell may launch both."""
    framework, environ = {"framework": "reference_suite"}, {"MODEL_SIZE": "405b", "NEMORUN_HOME": "/lustre"}
    old = read_launch(CATALOGUE, job_options(), environ | {"NUM_NODES": "4"}, "pretrain_llama3.1", framework, {})
    assert "framework_arg" not in old.values
    assert "NEMORUN_HOME is not needed: the launch script of that release does not read it" in old.notes
    new = read_launch(CATALOGUE, job_options(), environ | {"JOB_TOTAL_GPUS": "32"}, "pretrain_llama3.1", framework, {})
    assert new.values["framework_arg"] == ["nemorun_home=/lustre"]


@pytest.mark.parametrize("lines", [nemo_lines, nemo1_lines])
def test_a_log_of_another_recipe_is_known_by_its_samples(lines: Callable[..., str], tmp_path: Path) -> None:
    plan, folder = order_of(LLAMA, "8b", 8).plan, RunFolder(tmp_path)
    for gbs, said in (
        (128, None),
        (256, "another recipe: 12800 samples were consumed by step 49, but the plan has 6400"),
    ):
        folder.log.write_text(lines([1.0] * 50, gbs=gbs).replace("|n|", "\n") + "\n")
        found = other_batch(folder, plan)
        assert said in str(found) if said else found is None
    folder.log.write_text(lines([1.0] * 20, last=19).replace("|n|", "\n") + "\n")
    assert "its last step is 19, but the plan's is 49" in str(other_batch(folder, plan))


@pytest.mark.parametrize(
    ("recipe", "size", "scale", "choices", "framework", "window"),
    [
        (OLDEST, "405b", 576, Choices(), {}, (49, 49)),
        (LLAMA, "8b", 8, Choices(), {}, (49, 49)),
        (NEMOTRON, "15b", 16, Choices(steps=20), {}, (19, 19)),
        (MAVERICK, "400b", 256, Choices(), {}, (11, 44)),
        (LLAMA, "8b", 8, Choices(window="35-44"), {}, (35, 44)),
        # What trains is not the document's own software any more.
        (LLAMA, "8b", 8, Choices(), {"image": "/x/nvidia+nemo+25.02.01.sqsh"}, (35, 44)),
    ],
)
def test_runs_of_the_documents_software_have_the_documents_window(
    recipe: tuple[str, str, str],
    size: str,
    scale: int,
    choices: Choices,
    framework: dict[str, object],
    window: tuple[int, int],
) -> None:
    plan = order_of(recipe, size, scale, choices, **framework).plan
    assert (plan.window.first, plan.window.last) == window
    again = planned_window(plan, DEFAULT_RULE)
    assert (again.first, again.last) == (window if choices.window == DEFAULT_RULE else (49, 49))


@pytest.mark.parametrize(
    ("recipe", "size", "scale", "lines", "published_s"),
    [(OLDEST, "405b", 576, nemo1_lines, 17.20), (LLAMA, "8b", 8, nemo_lines, 12.27)],
)
def test_a_run_is_judged_by_the_documents_statistic(
    recipe: tuple[str, str, str], size: str, scale: int, lines: Callable[..., str], published_s: float, tmp_path: Path
) -> None:
    """Each time that 24.11 prints is the mean of five steps, so that the last one is of steps 45-49."""
    plan, folder = order_of(recipe, size, scale, dtype="bf16").plan, RunFolder(tmp_path)
    folder.log.write_text(lines([published_s] * 50, gbs=plan.recipe.layout.gbs).replace("|n|", "\n") + "\n")
    record = queued_record(plan, (), program="reference_suite")
    log_format = format_called(launch_scripts()[0 if recipe is OLDEST else 1].log_format)
    outcome = judge_latest_attempt(folder.log, plan.window, log_format)
    result = with_verdict(result_of_log(plan, outcome, End(0), log_format), record)
    assert isinstance(result.verdict, Verdict)
    assert (result.verdict.verdict, result.verdict.delta_pct) == ("pass", 0)
    assert {condition.key for condition in result.verdict.conditions} <= {"errata", "peak_tflops"}
    assert "one time each" in result.verdict.sentence


@pytest.fixture
def lora(tmp_path: Path) -> SmallSuite:
    root = tmp_path / "root"
    root.mkdir()
    made = small_suite(tmp_path, root, ("finetune_llama3", "70b", "25.12"), "/usr/bin:/bin", programs=False)
    nemo_run = tmp_path / "environment" / "lib" / "python3.12" / "site-packages" / "nemo_run"
    nemo_run.mkdir(parents=True)
    (nemo_run / "__init__.py").touch()
    made.environ["VIRTUAL_ENV"] = str(tmp_path / "environment")
    return made


def real_order(suite: SmallSuite, **framework: object) -> Order:
    place = {"root": suite.root, "shell": suite.environ, "suite": str(suite.checkout)}
    return order_of(LORA, "70b", 8, dry_run=False, **place, **framework)


def refused(suite: SmallSuite, **framework: object) -> str:
    with pytest.raises(NotPrepared) as error:
        real_order(suite, **framework)
    return error.value.what


def test_a_modified_script_is_named_and_can_be_called_all_the_same(lora: SmallSuite) -> None:
    assert "llama3/finetune/launch.sh is modified" in refused(lora)
    assert real_order(lora, modified_suite=True).plan.documented_software is None


def test_everything_that_is_missing_is_named_before_a_job_is_queued(lora: SmallSuite, tmp_path: Path) -> None:
    image = lora.root / "images" / "nvidia+nemo+25.09.00.sqsh"
    write_image(image, missing_bytes=100)
    (lora.root / "workloads" / "finetune_llama3" / "NeMo" / ".git" / "HEAD").write_text("0" * 40)
    data = lora.root / "workloads" / "finetune_llama3" / "checkpoint_and_dataset"
    shutil.rmtree(data)
    lora.environ.pop("HF_TOKEN")
    lora.environ["VIRTUAL_ENV"] = str(tmp_path / "none")
    found = refused(lora)
    assert "is incomplete: it has 3996 of 4096 bytes" in found
    assert "is not at commit 032e4de5b7b69d2a53ca76397cf79ff0941951b1" in found
    assert "checkpoint_and_dataset does not exist: call ./download_ckpt_dataset.sh" in found
    assert "there is no NeMo-Run" in found
    assert "HF_TOKEN is not set" in found
    (data / "models" / "meta-llama" / "Meta-Llama-3-70B").mkdir(parents=True)
    (data / "models" / "meta-llama" / "Meta-Llama-3-70B" / "checkpoint.json").write_text("{}")
    assert "Meta-Llama-3-70B is of llmb, it is a checkpoint of llmb, which NeMo cannot read" in refused(lora)
    image.unlink()
    assert "No such file or directory: import it from nvcr.io#nvidia/nemo:25.09.00" in refused(lora)
    assert "--image is NeMo 25.04.01, but the release uses 25.09.00" in refused(
        lora, image="/x/nvidia+nemo+25.04.01.sqsh"
    )


def test_an_image_is_known_by_its_superblock(tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    write_image(image)
    assert image_problem(image) is None
    image.write_bytes(b"<html>")
    assert image_problem(image) == "is not a squashfs image"


def test_every_variable_that_llmb_sets_is_read_or_is_the_documents() -> None:
    for script in launch_scripts():
        assert set(script.always) <= script.reads | {*script.unread}, script.title
        assert set(script.unread) <= set(script.always), script.title


@AS_RELEASED
@pytest.mark.parametrize("tag", dict.fromkeys(item.tag for item in launch_scripts()))
def test_the_facts_are_those_of_each_tag(tag: str, tmp_path: Path) -> None:
    checkout = checked_out(tag, tmp_path)
    found = check_checkout(checkout)
    assert {(item.script.tag, item.state) for item in found} == {(tag, "as released")}
    for script in (item for item in launch_scripts() if item.tag == tag):
        lines = {name: (checkout / name).read_text().splitlines() for name in script.files}
        for fact in script.facts:
            assert lines[fact.file][fact.line - 1].strip() == fact.text
        for name, read in script.variables.items():
            assert all(variable in lines[name][line - 1] for variable, line in read.items()), name
        for option, line in script.options.items():
            assert option in lines[script.options_file][line - 1]
    launch = checkout / script.folder / script.script
    launch.write_text(launch.read_text().replace(script.facts[-1].text, "") + "\n")
    assert {item.state for item in check_checkout(checkout)} == {"as released", "modified"}
