# SPDX-License-Identifier: Apache-2.0
"""The commands by which the reference documents look for results, run on what llmb leaves."""

import subprocess
from pathlib import Path

import pytest
from documented_launch import launched

from llmb.jobs.begin import begin
from llmb.jobs.finish import finish_job
from llmb.jobs.order import Order
from llmb.launch.jobspec.spec import write_spec
from llmb.readers.logs.configuration import document_of_log
from llmb.readers.logs.log_files import find_logs
from llmb.readers.logs.step_line import SaveLine, format_save_line, format_step_line
from llmb.readers.nccl.nccl_log import find_nccl_files
from llmb.runs.checkpoints.checkpoint import CheckpointRecord, checkpoint_name, read_checkpoint
from llmb.runs.experiment import create_run_folder
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan
from llmb.runs.record import queued_record, write_record

COLLECTIVE = (
    "NCCL INFO AllReduce: opCount 2 sendbuff 0x7ffb4713c200 recvbuff 0x7ffb4713c200 count 1 datatype 1 op 0 root 0 "
    "comm 0x55556b100660 [nranks=128] stream 0x5555630c58b0"
)
"""25.07, line 291."""
PARSER = Path(__file__).parents[2] / "support" / "reference_parser.sh"
JOB = {"SLURM_JOB_ID": "933609", "SLURM_JOB_NODELIST": "node001"}


def ran(order: Order) -> RunFolder:
    """A run as its job leaves it, with a log of the engine's lines and with its last checkpoint."""
    plan = order.plan
    assert isinstance(plan, EnginePlan)
    folder = create_run_folder(order.site.install, plan)
    write_record(folder, queued_record(plan, ("sbatch",)))
    write_spec(folder, order.spec(folder))
    begin(folder, JOB)
    with folder.log.open("a") as log:  # as the batch script does
        for step in range(plan.steps):
            log.write(step_line(plan, step) + "\n")
        if plan.save_checkpoint:
            log.write(format_save_line(SaveLine(0, plan.steps, 1744408121.151, 4.389)) + "\n")
            save_checkpoint(folder, plan)
    if plan.nccl_trace:
        folder.nccl_trace.mkdir()
        for rank in range(2):
            (folder.nccl_trace / f"rank-{rank}.log").write_text(f"node001:10{rank}:20{rank} [{rank}] {COLLECTIVE}\n")
    finish_job(folder, 0)
    return folder


def step_line(plan: EnginePlan, step: int) -> str:
    return format_step_line(
        step=step,
        steps=plan.steps,
        lr=1e-6,
        global_batch_size=plan.recipe.layout.gbs,
        peak_memory_bytes=72972500992,
        memory_allocated_bytes=34466545664,
        loss=12.81,
        step_time_s=2.693,
        tflops_per_gpu=610.0,
        consumed_samples=plan.samples_before(step + 1),
    )


def save_checkpoint(folder: RunFolder, plan: EnginePlan) -> None:
    samples = plan.samples_before(plan.steps)
    path = folder.checkpoints / checkpoint_name(plan.steps, samples)
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "__0_0.distcp").write_bytes(b"w")
    recipe = plan.recipe
    record = CheckpointRecord(
        llmb_version="0.1",
        saved_at="2026-01-01",
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        model=recipe.model,
        layout=recipe.layout,
        training=recipe.training,
        seed=1,
        step=plan.steps,
        consumed_samples=samples,
        files={"weights/__0_0.distcp": 1},
        crc32={"weights/__0_0.distcp": "00000000"},
    )
    (path / "checkpoint.json").write_text(record.model_dump_json())


def shell(stage: Path, line: str) -> str:
    """Runs a line of a document where it is meant to be run."""
    done = subprocess.run(["bash", "-c", line], cwd=stage, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}: {done.stderr or 'found nothing'}"
    return done.stdout


LLAMA_8B = {"DTYPE": "bf16", "MODEL_SIZE": "8b", "JOB_TOTAL_GPUS": "8", "GPUS_PER_NODE": "8"}
NEMOTRON = {"DTYPE": "fp8", "MODEL_SIZE": "15b", "JOB_TOTAL_GPUS": "64"}
OLD = {"DTYPE": "fp8", "MODEL_SIZE": "405b", "NUM_NODES": "72"}


@pytest.mark.parametrize(
    ("workload", "variables", "line", "folder"),
    [
        # 24.11, lines 17, 12 and 112
        ("pretrain_llama3.1", OLD, "grep train_step_timing results/*.out", "results/24.11/fp8/405b/576"),
        # 25.04 Llama 3.1, lines 35 and 136
        (
            "pretrain_llama3.1",
            LLAMA_8B,
            "grep -r --include '*.out' train_step_timing experiments",
            "experiments/pretrain_llama3.1_8b_bf16_8",
        ),
        # 25.04 Nemotron4, lines 34, 194 and 209
        (
            "pretrain_nemotron4",
            NEMOTRON,
            "grep -r --include '*.out' train_step_timing experiments",
            "experiments/pretrain_nemotron4_15b_fp8_64/pretrain_nemotron4_15b_fp8_64_*/pretrain_nemotron4_15b_fp8_64",
        ),
    ],
)
def test_the_documents_grep_finds_the_steps(
    tmp_path: Path, workload: str, variables: dict[str, str], line: str, folder: str
) -> None:
    order = launched(tmp_path, workload, variables)
    run = ran(order)
    found = shell(tmp_path, line).splitlines()
    assert len(found) == 50
    assert found[-1].endswith(step_line(order.plan, 49))  # type: ignore[arg-type]
    shell(tmp_path, f"cd {folder} && grep -r train_step_timing .")
    logs = find_logs(tmp_path).logs
    assert len(logs) == 1, "a log counts once, whatever names it has"
    assert logs[0].samefile(run.log)


@pytest.mark.parametrize(
    ("workload", "variables", "experiment", "samples"),
    [
        # 25.04 Llama 3.1, lines 186-207; 25.04 Nemotron4, lines 268-301
        (
            "pretrain_llama3.1",
            {**LLAMA_8B, "DTYPE": "fp8", "MODEL_SIZE": "70b", "JOB_TOTAL_GPUS": "256"},
            "pretrain_llama3.1_70b_fp8_256",
            25600,
        ),
        ("pretrain_nemotron4", NEMOTRON, "pretrain_nemotron4_15b_fp8_64", 12800),
    ],
)
def test_checkpoints_are_where_the_documents_look(
    tmp_path: Path, workload: str, variables: dict[str, str], experiment: str, samples: int
) -> None:
    run = ran(launched(tmp_path, workload, {**variables, "ENABLE_CHECKPOINT": "true"}))
    above = f"experiments/{experiment}/{experiment}_*/{experiment}"
    saved = f"{above}/code/nemo_experiments/default/checkpoints"
    assert "__0_0.distcp" in shell(tmp_path, f"ls {saved}/*/weights/*.distcp")
    assert "Iteration: 50" in shell(tmp_path, f"grep 'Global Checkpoint Save : Rank: 0' {above}/log-*.out")
    name = f"default--None=0.0000-epoch=0-consumed_samples={samples}.0"
    path = shell(tmp_path, f"echo {saved}/{name}").strip()
    checkpoint = read_checkpoint(tmp_path / path)
    assert checkpoint.record.step == 50
    resumed = launched(tmp_path, workload, {**variables, "LOAD_CHECKPOINT_PATH": f"{tmp_path}/{path}"}).plan
    assert resumed.start
    assert (resumed.start.step, resumed.steps) == (50, 1)
    assert not [link for link in run.path.rglob("*") if link.is_symlink()]


@pytest.mark.parametrize(
    ("workload", "variables", "folder"),
    [
        # 25.04 Llama 3.1, line 162; 25.04 Nemotron4, line 231
        (
            "pretrain_llama3.1",
            {"DTYPE": "fp8", "MODEL_SIZE": "70b", "JOB_TOTAL_GPUS": "256", "GPUS_PER_NODE": "8"},
            "pretrain_llama3.1_70b_fp8_256/pretrain_llama3.1_70b_fp8_256_*/pretrain_llama3.1_70b_fp8_256_nsys",
        ),
        (
            "pretrain_nemotron4",
            {"DTYPE": "bf16", "MODEL_SIZE": "15b", "JOB_TOTAL_GPUS": "16"},
            "pretrain_nemotron4_15b_bf16_16_nsys/pretrain_nemotron4_15b_bf16_16_nsys_*/pretrain_nemotron4_15b_bf16_16_nsys",
        ),
    ],
)
def test_profiles_are_where_the_documents_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: str, variables: dict[str, str], folder: str
) -> None:
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    run = ran(launched(tmp_path, workload, {**variables, "ENABLE_PROFILE": "true"}))
    run.nsys_profile.mkdir()
    (run.nsys_profile / "profile_0.nsys-rep").touch()
    assert "profile_0" in shell(tmp_path, f"ls experiments/{folder}/nsys_profile/profile_*.nsys-rep")


@pytest.mark.parametrize(
    ("workload", "variables", "root", "folder"),
    [
        # 25.04 Llama 3.1, line 172
        (
            "pretrain_llama3.1",
            {"DTYPE": "fp8", "MODEL_SIZE": "8b", "JOB_TOTAL_GPUS": "16"},
            "STAGE_PATH",
            "experiments/pretrain_llama3.1_8b_fp8_16/pretrain_llama3.1_8b_fp8_16_*/pretrain_llama3.1_8b_fp8_16_nccltrace",
        ),
        # 25.07, lines 201-217 and 268
        (
            "finetune_llama4-maverick",
            {"JOB_TOTAL_GPUS": "256", "DTYPE": "fp8", "GPU_TYPE": "b200"},
            "LLMB_INSTALL",
            "workloads/finetune_llama4-maverick/experiments/*/*/*",
        ),
    ],
)
def test_nccl_lines_are_in_the_log_of_a_traced_run(
    tmp_path: Path, workload: str, variables: dict[str, str], root: str, folder: str
) -> None:
    run = ran(launched(tmp_path, workload, {**variables, "ENABLE_NCCLTRACE": "true"}, root))
    found = shell(tmp_path, f'grep -h "NCCL INFO AllReduce: opCount" {folder}/log-*.out').splitlines()
    assert [line.partition("] ")[2] for line in found] == [COLLECTIVE, COLLECTIVE]
    assert "train_step_timing" in shell(tmp_path, f"cat {folder}/log-*.out")
    assert {file.outcome.status for file in find_logs(tmp_path).refused} == {"traced"}
    assert len(find_nccl_files([run.path])) == 2, "each call counts once"


@pytest.mark.parametrize(("settings", "account"), [("", "default"), ("slurm: {account: research}\n", "research")])
def test_the_suites_parser_shows_the_experiment_and_the_job_of_a_link(
    tmp_path: Path, settings: str, account: str
) -> None:
    """Of ``log-<experiment>.out`` it would show what is behind the first dot."""
    (tmp_path / "cluster_config.yaml").write_text(settings)
    run = ran(launched(tmp_path, "pretrain_llama3.1", LLAMA_8B))
    begin(run, {**JOB, "SLURM_RESTART_COUNT": "1"})
    (link,) = (tmp_path / "experiments").rglob("*.out")
    assert link.name == f"log-{account}.{run.path.name}_933609_0.out"
    shown = shell(tmp_path, f"bash {PARSER} experiments")
    assert f"\n{run.path.name}_933609 " in shown
    assert document_of_log(link) is None, "the document's own software did not train"


def test_without_stage_path_there_are_no_other_names(tmp_path: Path) -> None:
    ran(launched(tmp_path, "pretrain_llama3.1", LLAMA_8B, root="LLMB_INSTALL"))
    assert [path.name for path in tmp_path.iterdir()] == ["workloads"]


def test_a_file_system_without_hard_links_gets_symbolic_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(link: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(link), None, str(target))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    run = ran(launched(tmp_path, "pretrain_llama3.1", LLAMA_8B))
    (link,) = (tmp_path / "experiments").rglob("log-*.out")
    assert link.is_symlink()
    assert link.samefile(run.log)


def test_a_link_that_cannot_be_made_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiments").write_text("in the way")
    folder = ran(launched(tmp_path, "pretrain_llama3.1", LLAMA_8B))
    assert folder.log.exists()
    assert "is not linked" in capsys.readouterr().err
