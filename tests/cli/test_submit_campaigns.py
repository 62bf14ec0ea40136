# SPDX-License-Identifier: Apache-2.0
"""llmb submit with lists, bulk and launch, as far as they go without a cluster."""

import gc
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from typer.testing import CliRunner, Result

from llmb.base.errors import InfrastructureError, LlmbError, UsageError, UserInterrupt
from llmb.base.options import options_of
from llmb.cli.main import app, load_command
from llmb.jobs.campaigns.expansion import Selection, campaign_keys
from llmb.jobs.campaigns.proposal import job_options
from llmb.launch.documents.variables import documented_variables


@pytest.fixture
def install(tmp_path: Path) -> Path:
    folder = tmp_path / "install"
    folder.mkdir()
    (folder / "cluster_config.yaml").write_text("gpu_type: h100\n")
    return folder


@pytest.fixture
def environ(install: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Nothing of the shell that the tests run in."""
    for variable in documented_variables():
        monkeypatch.delenv(variable.name, raising=False)
    return {"LLMB_INSTALL": str(install)}


def call(command: str, environ: dict[str, str], *arguments: str) -> Result:
    return CliRunner().invoke(app, [command, *arguments], env=environ)


def shown(command: str, environ: dict[str, str], *arguments: str) -> list[dict[str, Any]]:
    """The jobs that a campaign would queue."""
    result = call(command, environ, *arguments, "--dry-run", "--json")
    assert result.exception is None, result.output
    return json.loads(result.stdout)["jobs"]


def refused(command: str, environ: dict[str, str], *arguments: str) -> LlmbError:
    error = call(command, environ, *arguments).exception
    assert isinstance(error, UsageError), error
    return error


def test_lists_make_a_campaign(environ: dict[str, str]) -> None:
    jobs = shown("submit", environ, "-w", "pretrain_llama3.1", "-s", "8b,70b", "--dtype", "bf16", "--max-scale", "128")
    assert [(job["size"], job["scale"], job["nodes"], job["gpu_hours"]) for job in jobs] == [
        ("8b", 128, 16, 64.0),
        ("70b", 128, 16, 64.0),
        ("8b", 64, 8, 32.0),
        ("70b", 64, 8, 32.0),
        ("8b", 32, 4, 16.0),
        ("8b", 16, 2, 8.0),
        ("8b", 8, 1, 4.0),
    ]
    assert {job["state"] for job in jobs} == {"planned"}


def test_a_campaign_is_queued_twice_only_if_that_is_asked_for(
    environ: dict[str, str], install: Path, program: Callable[[str, str], None]
) -> None:
    """Its client may have been killed after the last job was queued."""
    program("sbatch", f"echo x >>{install}/asked; wc -l <{install}/asked")

    def queued() -> int:
        return (install / "asked").read_text().count("x")

    command = ("submit", environ, "-w", "pretrain_llama3.1", "-s", "8b", "--scale", "8,16", "--dtype", "bf16")
    assert call(*command, "--yes").exception is None
    assert queued() == 2
    error = refused(*command, "--yes")
    assert "all 2 jobs were already queued by campaign " in error.what
    assert "--new" in str(error.do)
    shown = call(*command, "--dry-run")
    assert shown.exception is None
    assert "--new queues them again" in shown.stderr
    assert queued() == 2
    assert call(*command, "--yes", "--new").exception is None
    assert call(*command, "--yes", "--steps", "7").exception is None, "another campaign"
    assert queued() == 6


def test_one_recipe_is_a_job_and_its_script_is_printed(environ: dict[str, str]) -> None:
    options = ("-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "8", "--dry-run")
    script = call("submit", environ, *options)
    assert script.stdout.startswith("#!/bin/bash\n# pretrain_llama3.1 8b bf16 on 8 x h100")
    assert call("submit", environ, "-w", "pretrain_llama3.1_8b", "--dry-run").stdout == script.stdout
    document = json.loads(call("submit", environ, *options, "--json").stdout)
    assert document["script"] == script.stdout
    assert [choice["name"] for choice in document["unspecified"]] == ["GPU type"]
    assert len(shown("submit", environ, *options, "--repeats", "3")) == 3
    fits = "may not fit: rank 0 needs about 117.4 of 80 GiB"
    assert fits not in script.stderr
    assert all(fits in call(name, environ, *options, "--mbs", "4").stderr for name in ("submit", "run"))


def test_a_scale_at_which_nobody_saves_draws_a_warning(environ: dict[str, str]) -> None:
    recipe = ("-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--dry-run", "--save-checkpoint")
    warned = call("submit", environ, *recipe, "--scale", "8")
    assert warned.exit_code == 0
    assert "llmb: warning: published runs that save checkpoints have 16 to 128 GPUs, not 8" in warned.stderr
    assert "warning" not in call("submit", environ, *recipe, "--scale", "16").stderr


def test_nodes_are_given_as_to_sbatch(environ: dict[str, str]) -> None:
    environ |= {"DTYPE": "fp8", "MODEL_SIZE": "405b"}
    given = ("-A", "research", "-p", "batch", "-N", "72", "--gres=gpu:8")
    result = call("launch", environ, "pretrain_llama3.1", *given, "--dry-run")
    requested = [line.removeprefix("#SBATCH --") for line in result.stdout.splitlines() if line.startswith("#SBATCH")]
    for flag in ("nodes=72", "gres=gpu:8", "account=research", "partition=batch"):
        assert flag in requested
    assert not any(flag.startswith("gpus-per-node") for flag in requested)
    assert "405b fp8 on 576 x h100" in result.stdout
    assert "note: release 24.11 is used instead of " in result.stderr
    newest = call("launch", environ | {"NUM_NODES": "128"}, "pretrain_llama3.1", "--release", "25.04", "--dry-run")
    assert "405b fp8 on 1024 x h100" in newest.stdout
    error = refused("launch", environ | {"JOB_TOTAL_GPUS": "64"}, "pretrain_llama3.1", "-N", "4", "--dry-run")
    assert error.what == "--nodes 4 x 8 GPUs per node = 32 GPUs, but the scale is 64"
    script = call("submit", environ, "-w", "pretrain_llama3.1_405b", "-N", "4", "--dry-run").stdout
    assert "405b PROXY (8 of 126 layers) bf16 on 32 x h100" in script


def test_the_release_follows_from_a_variable_that_only_its_document_has(environ: dict[str, str]) -> None:
    environ |= {"DTYPE": "bf16", "MODEL_SIZE": "405b"}
    old = call("launch", environ | {"SBATCH_GPUS": "32"}, "pretrain_llama3.1", "--dry-run")
    assert "gbs126" in old.stdout
    new = call("launch", environ | {"JOB_TOTAL_GPUS": "32"}, "pretrain_llama3.1", "--dry-run")
    assert "gbs64" in new.stdout
    assert "release 25.04 (or 24.11)" in new.stderr
    assert "note: release" not in new.stderr


def test_a_profile_is_a_run_beside_the_others(environ: dict[str, str], file: Path) -> None:
    one = ("-w", "pretrain_llama3.1", "-s", "8b", "--scale", "8")
    assert call("submit", environ, *one, "--profile", "--dry-run").stdout.startswith("#!/bin/bash")
    jobs = shown("submit", environ, *one, "--repeats", "2", "--profile")
    assert [(job["repeat"], job["profiled"]) for job in jobs] == [(1, False), (2, False), (3, True)]
    jobs = shown("bulk", environ, str(file), "-s", "15b", "--profile")
    assert [(job["repeat"], job["profiled"]) for job in jobs] == [(1, False), (2, False), (3, True)]
    error = refused("submit", environ, *one, "--repeats", "2", "--profile", "--nccl-trace", "--dry-run")
    assert "mutually exclusive" in error.what


def test_everything_that_the_engine_can_run_is_found(environ: dict[str, str]) -> None:
    result = call("submit", environ, "--max-scale", "64", "--dtype", "bf16", "--dry-run")
    assert {"pretrain_llama3.1", "pretrain_nemotron4"} <= set(result.stdout.split())
    assert "GPU-hours" in result.stdout


def test_a_campaign_has_one_gpu_type(environ: dict[str, str], install: Path) -> None:
    (install / "cluster_config.yaml").unlink()
    error = refused("submit", environ, "--max-scale", "64", "--dry-run")
    assert "the cluster's GPU type is not specified" in error.what


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scale", "8", "--max-scale", "64"), "--scale cannot be combined"),
        (("--scale", "eight"), "--scale is 'eight'"),
        (("-w", "pretrain_llama3.1,"), "--workload is 'pretrain_llama3.1,'"),
        (("-w", "pretrain_llama3.1,pretrain_nemotron5"), "did you mean 'pretrain_nemotron4'"),
        (("-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16,fp9"), "unknown dtype 'fp9'"),
        (("-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "24,48"), "has no layout for 48 GPUs"),
        (("-w", "pretrain_llama3.1", "-s", "8b", "--repeats", "2", "--wait"), "--wait follows a single job"),
        (("-w", "pretrain_llama3.1", "-s", "8b", "--repeats", "2", "--tp", "3"), "is not divisible by TP 3"),
        (
            ("-w", "pretrain_llama3.1", "-s", "8b", "--repeats", "2", "--resume"),
            "there is no unfinished campaign from this source",
        ),
    ],
)
def test_what_cannot_be_queued_is_refused(environ: dict[str, str], options: tuple[str, ...], words: str) -> None:
    assert words in str(refused("submit", environ, *options))


def test_nobody_is_asked_without_a_terminal(environ: dict[str, str]) -> None:
    error = refused("submit", environ, "-w", "pretrain_llama3.1", "-s", "8b", "--repeats", "2")
    assert "2 jobs, 8 GPU-hours at most" in error.what
    assert "--yes" in str(error.do)


FILE = """\
# two recipes, one of them twice
pretrain_llama3.1 8b bf16 8,16 steps=20 env.NCCL_DEBUG=INFO partition=batch
pretrain_nemotron4_15b bf16 16 repeats=2 seq-len=2048
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.txt"
    path.write_text(FILE)
    return path


def briefly(jobs: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(job["size"], job["scale"], job["repeat"]) for job in jobs]


def test_a_file_is_a_campaign(environ: dict[str, str], file: Path) -> None:
    jobs = shown("bulk", environ, str(file))
    assert briefly(jobs) == [("8b", 16, 1), ("15b", 16, 1), ("15b", 16, 2), ("8b", 8, 1)]
    assert jobs[0]["asked_by"] == f"{file}:2"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--repeats", "2", "-s", "8b"), [("8b", 16, 1), ("8b", 16, 2), ("8b", 8, 1), ("8b", 8, 2)]),
        (("-w", "pretrain_nemotron4"), [("15b", 16, 1), ("15b", 16, 2)]),
        (("--max-scale", "8"), [("8b", 8, 1)]),
        (("--scale", "16", "--repeats", "1"), [("8b", 16, 1), ("15b", 16, 1)]),
        (("--min-scale",), [("15b", 16, 1), ("15b", 16, 2), ("8b", 8, 1)]),
    ],
)
def test_options_leave_some_of_a_file(
    environ: dict[str, str], file: Path, options: tuple[str, ...], expected: list[tuple[str, int, int]]
) -> None:
    assert briefly(shown("bulk", environ, str(file), *options)) == expected


@pytest.mark.parametrize("options", [(), ("-s", "15b", "--profile"), ("--repeats", "2", "-w", "pretrain_llama3.1")])
def test_submit_takes_a_file_as_documented(environ: dict[str, str], file: Path, options: tuple[str, ...]) -> None:
    """In 25.12 ``llmb-run submit -f FILE`` has taken the place of ``bulk``."""
    commands = (("submit", "-f", str(file)), ("bulk", str(file)))
    ours, theirs = (shown(command, environ, *words, *options) for command, *words in commands)
    assert ours
    assert [{**job, "key": None} for job in ours] == [{**job, "key": None} for job in theirs]


def test_a_file_is_not_one_job(environ: dict[str, str], file: Path) -> None:
    assert "--wait follows a single job" in refused("submit", environ, "--file", str(file), "--wait").what


def test_a_campaign_warns_of_a_list_of_more_nodes_than_a_job_has(environ: dict[str, str]) -> None:
    options = ("-w", "pretrain_llama3.1", "-s", "8b", "--scale", "8,16", "--nodelist", "node[1-2]", "--dry-run")
    warned = [line for line in call("submit", environ, *options).stderr.splitlines() if "--nodelist" in line]
    assert warned == ["llmb: warning: --nodelist has 2 nodes, but the job has 1; Slurm will reject it"]


def test_options_come_before_the_file(environ: dict[str, str], file: Path, install: Path) -> None:
    command = ("--yes", "--gbs", "64", "--env", "NCCL_DEBUG=WARN", "--time-limit", "5", "--scale", "16")
    result = call("bulk", environ, str(file), *command)
    assert "sbatch was not found" in str(result.exception) or "Slurm" in str(result.exception)
    (campaign,) = (install / ".llmb" / "campaigns").glob("*.json")
    wanted = [job["wanted"] for job in json.loads(campaign.read_text())["jobs"]]
    assert [item["request"]["overrides"]["gbs"] for item in wanted] == [64, 64, 64]
    assert [item["choices"]["steps"] for item in wanted] == [20, None, None]
    assert [item["options"]["variables"] for item in wanted] == [{"NCCL_DEBUG": "WARN"}] * 3
    assert [item["options"]["flags"] for item in wanted] == [
        {"time": "5", "partition": "batch"},
        {"time": "5"},
        {"time": "5"},
    ]


def test_a_campaign_is_counted_and_listed_for_ci_systems(
    environ: dict[str, str], tmp_path: Path, program: Callable[[str, str], None]
) -> None:
    program("sbatch", f"echo x >>{tmp_path}/asked; wc -l <{tmp_path}/asked; [ $(wc -l <{tmp_path}/asked) != 2 ]")
    (tmp_path / "jobs.txt").write_text("pretrain_llama3.1 8b bf16 8,256\n")
    file = tmp_path / "campaign.xml"
    shown = call("bulk", environ, str(tmp_path / "jobs.txt"), "--yes", "--junit", str(file))
    assert "without a published figure: 1 of 2 jobs (pretrain_llama3.1 8b bf16 on 256 h100)" in shown.stderr
    assert "1 of 2 jobs are queued, 1 rejected" in shown.stderr
    (suite,) = JUnitXml.fromfile(str(file))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (2, 1, 0, 0)


def test_all_that_is_wrong_with_a_file_is_told(environ: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("""\
pretrain_llama3.1_8b:
  dtypes: bf16
  scales: [8, 24]
  sweep: {tp: [1, two]}
pretrain_lama3.1_8b: {scales: 8}
""")
    what = refused("bulk", environ, str(path), "--dry-run").what
    assert f"{path}:5: unknown workload 'pretrain_lama3.1_8b'; did you mean" in what
    assert f"{path}:2: pretrain_llama3.1 8b bf16 on 24 h100: pretrain_llama3.1 8b has no layout for 24 GPUs" in what
    assert "tp is 'two'; it must be a whole number" in what


@pytest.mark.parametrize("name", ["jobs.txt", "jobs.yaml"])
@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe\x00"])
def test_a_file_that_asks_for_nothing(
    environ: dict[str, str], tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert str(path) in str(refused("bulk", environ, str(path), "--dry-run"))


def test_a_launch_is_what_its_variables_say(environ: dict[str, str], install: Path) -> None:
    variables = {"JOB_TOTAL_GPUS": "16", "MODEL_SIZE": "8b", "DTYPE": "bf16", "GPU_TYPE": "h100", "MAX_STEPS": "20"}
    launched = call("launch", environ | variables, "pretrain_llama3.1", "--dry-run")
    assert launched.exception is None, launched.output
    same = ("-w", "pretrain_llama3.1", "-s", "8b", "--scale", "16", "--dry-run")
    assert launched.stdout == call("submit", environ, *same).stdout
    stage = install / "stage"
    staged = call(
        "launch", variables | {"STAGE_PATH": str(stage), "LLMB_INSTALL": ""}, "pretrain_llama3.1", "--dry-run"
    )
    assert f"--chdir={stage}/workloads/pretrain_llama3.1/" in staged.stdout


def test_options_of_a_launch_come_before_variables(environ: dict[str, str]) -> None:
    variables = {"JOB_TOTAL_GPUS": "16", "MODEL_SIZE": "8b", "TIME_LIMIT": "00:05:00", "GBS": "wrong"}
    result = call("launch", environ | variables, "pretrain_llama3.1", "--scale", "8", "--gbs", "256", "--dry-run")
    assert "_gpus8_" in result.stdout
    assert "_gbs256" in result.stdout
    assert "#SBATCH --time=00:05:00" in result.stdout


def test_a_launch_tells_of_names_that_are_almost_right(environ: dict[str, str]) -> None:
    variables = {"JOB_TOTAL_GPUS": "8", "MODEL_SIZE": "8b", "JOB_TOTAL_GPU": "16", "NEMO_HOME": "/nemo"}
    warning = "warning: JOB_TOTAL_GPU is not a variable that llmb reads; did you mean JOB_TOTAL_GPUS?"
    result = call("launch", environ | variables, "pretrain_llama3.1", "--dry-run")
    assert warning in result.stderr
    assert "note: NEMO_HOME is not needed" in result.stderr
    result = call("launch", environ | variables | {"TP": "two"}, "pretrain_llama3.1", "--dry-run")
    assert isinstance(result.exception, UsageError)
    assert warning in result.stderr


def test_a_launch_that_cannot_be_is_refused(environ: dict[str, str]) -> None:
    assert (
        "the number of GPUs is not specified"
        in refused("launch", environ | {"MODEL_SIZE": "8b"}, "pretrain_llama3.1").what
    )
    assert (
        "the size of pretrain_llama3.1 is not specified"
        in refused("launch", environ | {"JOB_TOTAL_GPUS": "8"}, "pretrain_llama3.1").what
    )
    wrong = refused("launch", environ | {"EP": "4", "ENABLE_CHECKPOINT": "perhaps"}, "pretrain_llama3.1").what
    assert "EP does not apply to pretrain_llama3.1" in wrong
    assert "ENABLE_CHECKPOINT is 'perhaps'; it must be true or false" in wrong
    both = {"ENABLE_PROFILE": "1", "ENABLE_NCCLTRACE": "1"}
    assert "are mutually exclusive" in refused("launch", environ | both, "pretrain_llama3.1").what


def test_every_variable_sets_an_option_of_launch() -> None:
    named = {use.sets for variable in documented_variables() for use in variable.uses if use.sets}
    named |= {option for variable in documented_variables() for use in variable.uses for option in use.adds}
    assert named <= set(job_options())


def test_every_option_of_a_job_is_a_key_of_files() -> None:
    keys = campaign_keys(job_options().values(), ())
    spelled = {
        spelled.lstrip("-").replace("-", "_")
        for option in load_command("submit").params
        if option.name in job_options() and option.name not in options_of(Selection)
        for spelled in option.opts
        if spelled.startswith("--")
    }
    assert spelled
    assert {keys.options[name].name for name in spelled} == set(job_options()) - set(options_of(Selection))


SAID = "echo 'sbatch: error: Batch job submission failed: {}' >&2; exit 1"


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(
    ("sbatch", "kind", "what"),
    [
        (
            SAID.format("Invalid account"),
            UsageError,
            "Slurm rejected the job: Batch job submission failed: Invalid account",
        ),
        (SAID.format("Socket timed out"), InfrastructureError, "the job may have been queued anyway"),
        ("kill -INT $PPID", UserInterrupt, "interrupted; the job may have been queued anyway"),
    ],
)
def test_what_becomes_of_a_job_that_is_not_submitted_is_said(
    environ: dict[str, str], install: Path, sbatch: str, kind: type[LlmbError], what: str
) -> None:
    program = install / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{sbatch}\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    tiny = ("-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "1")
    with warnings.catch_warnings():
        # Python waits a quarter of a second for the program that it called when it was interrupted, then leaves it.
        warnings.simplefilter("ignore", ResourceWarning)
        error = call("submit", environ | {"PATH": path}, *tiny).exception
        assert isinstance(error, kind), error
        assert what in error.what
        assert str(install) not in str(error)
        del error
        gc.collect()


def test_jobs_of_a_sweep_are_told_apart(environ: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("pretrain_llama3.1_8b: {dtypes: bf16, scales: 8, sweep: {seed: [1, 2]}}\n")
    swept = call("bulk", environ, str(path), "--dry-run").stdout
    assert swept.count("seed=1\n") == swept.count("seed=2\n") == 1
    assert "asked by" not in swept
    repeated = call(
        "submit", environ, "-w", "pretrain_llama3.1_8b", "--repeats", "2", "--scale", "8", "--dry-run"
    ).stdout
    assert "with" not in repeated
