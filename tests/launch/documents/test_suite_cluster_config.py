# SPDX-License-Identifier: Apache-2.0
"""The reference suite's own cluster_config.yaml asks Slurm, in each of its forms, for what it says."""

import shutil
from pathlib import Path

import pytest
from called_here import Done, Run

from llmb.base.errors import UsageError
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.site.cluster_config import SettingsFile, read_cluster_config, read_cluster_file
from llmb.setup.install.answers import Answers
from llmb.setup.install.cluster_file import write_settings
from llmb.setup.install.install_state import opened_journal

SAMPLES = Path(__file__).parents[2] / "data" / "reference_configs"
TOKEN = "hf_0123456789abcdefghijABCDEFGHIJ0123"


@pytest.fixture
def with_sample(llmb: Run, tmp_path: Path) -> Run:
    """``llmb`` with an install root that holds the sample that is named first."""

    def call(sample: str, *arguments: str) -> Done:
        target = tmp_path / "cluster_config.yaml"
        if not target.exists():
            shutil.copy(SAMPLES / f"{sample}.yaml", target)
        return llmb(*arguments)

    return call


def read(tmp_path: Path, text: str) -> SettingsFile:
    path = tmp_path / "cluster_config.yaml"
    path.write_text(text)
    return read_cluster_file(path, cluster_schema())


FLAGS = {
    "version2": {
        "account": "research",
        "partition": "batch",
        "gpus-per-node": "8",
        "qos": "normal",
        "exclude": "node[007,013]",
        "time": "00:30:00",
    },
    "launcher": {"account": "research", "partition": "gpu", "gpus-per-node": "4", "nodes": "4"},
    "flat": {
        "account": "research",
        "partition": "batch,backfill",
        "qos": "high",
        "comment": "weekly",
        "time": "01:30:00",
        "constraint": "gpu&memory",
    },
}
ABSENT = {"version2": ("reservation",), "launcher": ("qos",), "flat": ("gpus-per-node", "gres", "nodelist")}
VARIABLES = {
    "version2": {"HF_HOME": "/lustre/bench/.cache/huggingface", "NCCL_IB_HCA": "mlx5", "NCCL_IB_SL": "1"},
    "launcher": {"NCCL_DEBUG": "WARN", "MAX_RETRIES": "3"},
    "flat": {},
}
GPU_TYPES = {"version2": "h100", "launcher": "gb200", "flat": "h100"}


@pytest.mark.parametrize("sample", sorted(FLAGS))
@pytest.mark.parametrize("migrated", [False, True])
def test_slurm_is_asked_for_what_the_file_says(with_sample: Run, sample: str, migrated: bool) -> None:
    if migrated:
        done = with_sample(sample, "config", "migrate")
        assert done.returncode == 0, done.stderr
    done = with_sample(sample, "submit", "-w", "pretrain_llama3.1", "-s", "8b", "--scale", "16", "--dry-run")
    assert done.returncode == 0, done.stderr
    script = done.stdout.splitlines()
    flags = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in script if line.startswith("#SBATCH"))
    variables = dict(line.split()[1].partition("=")[::2] for line in script if line.startswith("export "))
    assert {name: flags.get(name) for name in FLAGS[sample]} == FLAGS[sample]
    assert not set(ABSENT[sample]) & set(flags)
    assert {name: variables.get(name) for name in VARIABLES[sample]} == VARIABLES[sample]
    assert f"16 x {GPU_TYPES[sample]}" in script[1]
    assert ("boost-slider" in done.stdout) == (sample == "flat")
    assert ("reference suite's" in done.stderr) == (not migrated)
    assert TOKEN not in done.stdout + done.stderr


def test_a_job_without_gpus_goes_to_the_cpu_partition(with_sample: Run) -> None:
    done = with_sample("version2", "submit", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--dry-run")
    assert "#SBATCH --partition=cpu\n" in done.stdout


def test_what_is_said_is_one_line_and_the_secret_by_name(with_sample: Run) -> None:
    done = with_sample("flat", "submit", "-w", "pretrain_llama3.1", "-s", "8b", "--scale", "16", "--dry-run")
    lines = [line for line in done.stderr.splitlines() if line.startswith("llmb: cluster_config.yaml")]
    assert lines == [
        "llmb: cluster_config.yaml has the reference suite's format (version 1); "
        "run 'llmb config migrate' to convert it to llmb's",
        "llmb: cluster_config.yaml contains secrets, which are ignored (set HF_TOKEN in your shell instead): HF_TOKEN",
    ]


def test_a_file_is_migrated_once_and_the_old_one_is_kept(with_sample: Run, tmp_path: Path) -> None:
    before = (SAMPLES / "flat.yaml").read_text()
    shown = with_sample("flat", "config", "migrate", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "cluster_config.yaml").read_text() == before
    done = with_sample("flat", "config", "migrate")
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "cluster_config.yaml.reference"
    assert kept.read_text() == before
    assert kept.stat().st_mode & 0o77 == 0
    written = (tmp_path / "cluster_config.yaml").read_text()
    assert shown.stdout.rstrip("\n") == written.rstrip("\n")
    assert TOKEN not in written + done.stdout + done.stderr
    assert "slurm_mpi_type" in done.stderr
    again = with_sample("flat", "config", "migrate")
    assert again.returncode == 0
    assert "nothing to migrate" in again.stderr
    assert (tmp_path / "cluster_config.yaml").read_text() == written


def test_an_installer_that_adds_to_the_file_migrates_it_first(tmp_path: Path) -> None:
    before = (SAMPLES / "version2.yaml").read_text()
    (tmp_path / "cluster_config.yaml").write_text(before)
    with opened_journal(tmp_path, Answers()) as journal:
        write_settings(journal, {"gpu_type": "h100", "python": "/venv/bin/python"}, keep=False)
    config = read_cluster_config(tmp_path, cluster_schema())
    assert (config.python, config.gpu_type) == ("/venv/bin/python", "h100")
    assert config.environment["NCCL_IB_HCA"] == "mlx5"
    assert (tmp_path / "cluster_config.yaml.reference").read_text() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema_version: 2\nlauncher: {gpu_type: h100}\n", "launcher is from version 1 of the suite's format"),
        ("launcher: {gpu_type: h100}\nslurm: {gpu: {partition: a}}\n", "slurm.gpu from version 2"),
        ("schema_version: 2\nslurm: {gpu_partition: a}\n", "slurm.gpu_partition is from version 1 of the suite's"),
        ("schema_version: 3\nllmb_install: /x\n", "schema_version is 3"),
        ("schema_version: 2\ncontainer: {runtime: pyxis}\n", "cluster_config.yaml:2: container: unknown key"),
        ("schema_version: 2\nslurm:\n  gpu: {partition: [a]}\n", "cluster_config.yaml:3: slurm.gpu.partition"),
        ("launcher: {}\nslurm: {Bad Key: x}\n", "slurm: Value error, 'bad key' is not a long name"),
    ],
)
def test_what_is_no_form_of_it_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("gres", "slurm"),
    [
        ("8", {"gpus_per_node": 8}),
        ("h100:8", {"gpus_per_node": 8, "gres_type": "h100"}),
        ("gpu:h100:8", {"gpus_per_node": 8, "gres_type": "h100"}),
        ("1", {}),
        ("null", {"gpu_request": "none"}),
        ("'null'", {"gpu_request": "none"}),
    ],
)
def test_gres_is_the_number_of_gpus_or_none(tmp_path: Path, gres: str, slurm: dict[str, object]) -> None:
    text = f"schema_version: 2\nslurm: {{gpu: {{partition: a, gres: {gres}}}}}\n"
    assert read(tmp_path, text).data["slurm"] == {"partition": "a", **slurm}


def test_what_is_not_taken_is_told(tmp_path: Path) -> None:
    file = read(tmp_path, (SAMPLES / "version2.yaml").read_text().replace("NCCL_IB_HCA: mlx5", "SLURM_X: a"))
    assert any("SLURM_X" in note for note in file.left_out)


def test_the_suites_own_software_is_found(tmp_path: Path) -> None:
    file = read(tmp_path, (SAMPLES / "version2.yaml").read_text())
    shared = "/lustre/bench/venvs/venv_0123456789ab"
    assert file.data["reference_suite"] == {
        "checkout": "/lustre/bench/llmb_repo",
        "environments": {"pretrain_llama3.1": shared, "finetune_llama3": shared},
    }


def test_llmbs_own_form_stays_its_own(tmp_path: Path) -> None:
    text = "cluster_name: eos\nslurm: {partition: a, cpu_partition: b}\nworkloads: {installed: {environment: {A: b}}}\n"
    file = read(tmp_path, text)
    assert file.form is None
    assert not file.notes
