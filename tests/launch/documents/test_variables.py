# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.campaigns.proposal import job_options
from llmb.launch.documents.variables import LaunchVariable, documented_variables, near_misses, read_variables

VARIABLES = documented_variables()
OPTIONS = job_options()
LLAMA, LORA, MAVERICK = "pretrain_llama3.1", "finetune_llama3", "finetune_llama4-maverick"
# Every variable that the inventory of the reference suite lists for a recipe's launch or preparation.
DOCUMENTED = """
STAGE_PATH MODEL_SIZE DTYPE SBATCH_GPUS RUN_CONF_IMAGE RUN_CONF_INDEX_DIR MAX_STEPS GBS TP PP VP CP SEQ_LEN
NUM_LAYERS ENABLE_PROFILE RUN_CONF_PROFILE_START_STEP RUN_CONF_PROFILE_STOP_STEP RUN_CONF_PROFILE_GPU_METRICS
OPTIMIZATION_NAME OPTIMIZATION_CODE SLURM_MPI_TYPE SRUN_OUTPUT SRUN_ERROR HF_TOKEN SBATCH_ACCOUNT SBATCH_PARTITION
JOB_TOTAL_GPUS GPUS_PER_NODE TIME_LIMIT NEMO_HOME NEMORUN_HOME HF_HOME DISABLE_PERFRUN PROFILE_START_STEP
PROFILE_STOP_STEP ENABLE_NCCLTRACE ENABLE_CHECKPOINT LOAD_CHECKPOINT_PATH CPU_PER_TASK_PINNING OPENBLAS_NUM_THREADS
GPU_TYPE LLMB_INSTALL EP ETP MBS CUDA_GRAPH HIDDEN_SIZE ENABLE_GPU_METRICS IMAGE SKIP_IMPORT_CHECKPOINT
SKIP_DATASET_DOWNLOAD RUN_CONF_MOUNTS FP8_RECIPE ENABLE_VBOOST ADDITIONAL_SLURM_PARAMS CONFIG_VARIANT
ENABLE_PYTORCH_PROFILE PROFILE_RANKS ENABLE_PCT_BINDING CHECKPOINT_DIR CHECKPOINT_INTERVAL SLURM_ACCOUNT
SLURM_PARTITION SLURM_GPUS_PER_NODE SBATCH_GPUS_PER_NODE LLMB_WORKLOAD"""
# What shells, Slurm, CUDA and others set; sbatch reads those that begin with SBATCH_.
OTHERS = """
PATH HOME USER LANG LC_ALL SHELL TERM DISPLAY PWD OLDPWD LOGNAME EDITOR TMPDIR HOSTNAME MAIL PS1 XDG_RUNTIME_DIR
SSH_CONNECTION SSH_TTY CUDA_HOME CUDA_VISIBLE_DEVICES NCCL_DEBUG NCCL_IB_HCA LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV
OMP_NUM_THREADS HF_HUB_CACHE HF_HUB_OFFLINE SLURM_JOB_ID SLURM_JOB_PARTITION SLURM_JOB_ACCOUNT SLURM_NODELIST
SLURM_NTASKS SLURM_GPUS SLURM_CONF JAVA_HOME MODULEPATH LOADEDMODULES SBATCH_ACCTG_FREQ SBATCH_ARRAY_INX SBATCH_CLUSTERS
SBATCH_CONTAINER SBATCH_CORE_SPEC SBATCH_CPUS_PER_GPU SBATCH_DEBUG SBATCH_DELAY_BOOT SBATCH_DISTRIBUTION SBATCH_ERROR
SBATCH_EXCLUSIVE SBATCH_EXPORT SBATCH_GET_USER_ENV SBATCH_GPU_BIND SBATCH_GPU_FREQ SBATCH_GPUS_PER_TASK SBATCH_GRES
SBATCH_HINT SBATCH_IGNORE_PBS SBATCH_INPUT SBATCH_JOB_NAME SBATCH_MEM_BIND SBATCH_MEM_PER_CPU SBATCH_MEM_PER_GPU
SBATCH_MEM_PER_NODE SBATCH_NETWORK SBATCH_NO_KILL SBATCH_NO_REQUEUE SBATCH_OPEN_MODE SBATCH_OUTPUT SBATCH_OVERCOMMIT
SBATCH_POWER SBATCH_PROFILE SBATCH_REQUEUE SBATCH_SIGNAL SBATCH_SPREAD_JOB SBATCH_THREAD_SPEC SBATCH_USE_MIN_NODES
SBATCH_WAIT SBATCH_WAIT_ALL_NODES SBATCH_WAIT4SWITCH SBATCH_WCKEY"""


def reading(workload: str = LLAMA, **environ: str) -> dict[str, object]:
    return dict(read_variables(VARIABLES, environ, workload, OPTIONS).options)


def refusal(workload: str = LLAMA, **environ: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        read_variables(VARIABLES, environ, workload, OPTIONS)
    return [line.removeprefix("  - ") for line in caught.value.what.splitlines()[1:]]


def test_every_documented_variable_is_known_once() -> None:
    names = [variable.name for variable in VARIABLES]
    assert set(names) >= set(DOCUMENTED.split())
    assert not [name for name, count in Counter(names).items() if count > 1]


def test_data_names_workloads_that_exist() -> None:
    named = {workload for variable in VARIABLES for use in variable.uses for workload in use.workloads}
    assert named <= set(Catalogue().workloads)


def test_a_launch_of_the_documents_is_read() -> None:
    assert reading(DTYPE="BF16", MODEL_SIZE="8b", JOB_TOTAL_GPUS="8", GPUS_PER_NODE="8") == {
        "dtype": "bf16",
        "size": "8b",
        "scale": 8,
        "gpus_per_node": 8,
    }
    assert reading(MAVERICK, EP="32", ETP="8", GPU_TYPE="B200", CUDA_GRAPH="false", HIDDEN_SIZE="5120") == {
        "ep": 32,
        "etp": 8,
        "gpu_type": "b200",
    }
    assert reading(VP="null", GBS="252", MAX_STEPS="50", ENABLE_PROFILE="true", PROFILE_START_STEP="20") == {
        "vp": 1,
        "gbs": 252,
        "steps": 50,
        "profile": True,
        "profile_start_step": 20,
    }
    assert reading(SLURM_GPUS_PER_NODE="null", ADDITIONAL_SLURM_PARAMS="nodelist=a,b;exclusive", TIME_LIMIT="30") == {}


def test_what_excludes_each_other_is_refused() -> None:
    assert refusal(ENABLE_PROFILE="true", ENABLE_NCCLTRACE="true") == [
        "ENABLE_PROFILE and ENABLE_NCCLTRACE are mutually exclusive; unset one of them"
    ]
    assert reading(ENABLE_PROFILE="false", ENABLE_NCCLTRACE="true") == {"profile": False, "nccl_trace": True}
    assert reading(ENABLE_PYTORCH_PROFILE="1") == {"profile": True, "profiler": "torch"}
    assert reading(ENABLE_PYTORCH_PROFILE="0") == {"profile": False}


def test_images_are_for_frameworks() -> None:
    environ = {"RUN_CONF_IMAGE": "/nemo.sqsh"}
    assert read_variables(VARIABLES, environ, LLAMA, OPTIONS).options == {}
    assert read_variables(VARIABLES, environ, LLAMA, OPTIONS, framework=True).options == {"image": "/nemo.sqsh"}


def test_values_have_the_options_names() -> None:
    assert reading(LORA, FP8_RECIPE="CS") == {"fp8_recipe": "current-all"}


def test_nodes_are_set_up_as_in_the_documents() -> None:
    assert reading(ENABLE_VBOOST="True", CPU_PER_TASK_PINNING="14") == {"vboost": "1", "cpu_binding": "14"}
    assert reading(ENABLE_VBOOST="false", CPU_PER_TASK_PINNING="0") == {"vboost": "0", "cpu_binding": "0"}


def test_an_empty_value_is_none() -> None:
    assert reading(TP="", ENABLE_PROFILE=" ") == {}


def test_all_that_is_wrong_is_told_at_once() -> None:
    problems = refusal(EP="4", MAX_STEPS="0", TIME_LIMIT="1:2:3:4", DTYPE="bf 16", ENABLE_PROFILE="maybe", TP="eight")
    assert problems == [
        "DTYPE is 'bf 16'; it must be a name",
        "MAX_STEPS is '0'; it must be a whole number of at least 1",
        "TP is 'eight'; it must be a whole number of at least 1",
        "EP does not apply to pretrain_llama3.1; it applies to finetune_llama4-maverick",
        "TIME_LIMIT is '1:2:3:4'; it must be a time such as 30, 00:30:00 or 1-12:00:00",
        "ENABLE_PROFILE is 'maybe'; it must be true or false",
    ]


@pytest.mark.parametrize(
    ("workload", "name", "value", "words"),
    [
        (LORA, "CUDA_GRAPH", "true", "must be false: CUDA graphs are unsupported"),
        (LORA, "HIDDEN_SIZE", "4096", "must be 8192"),
        (LLAMA, "CUDA_GRAPH", "true", "does not apply to pretrain_llama3.1; it applies to finetune_llama3"),
        (LLAMA, "OPTIMIZATION_CODE", "x", "NeMo's launcher"),
        (LLAMA, "ENABLE_VBOOST", "2", "must be true or false"),
        (LLAMA, "CPU_PER_TASK_PINNING", "all", "must be none, cores or a number"),
        (LLAMA, "ENABLE_PCT_BINDING", "true", "does not know which cores"),
        (LORA, "FP8_RECIPE", "mx", "must be cs"),
    ],
)
def test_what_does_not_apply_is_refused(workload: str, name: str, value: str, words: str) -> None:
    (problem,) = refusal(workload, **{name: value})
    assert problem.startswith(name)
    assert words in problem


def test_the_command_line_wins() -> None:
    environ = {"TP": "rubbish", "MODEL_SIZE": "8b"}
    assert read_variables(VARIABLES, environ, LLAMA, OPTIONS, explicit={"tp"}).options == {"size": "8b"}


def test_variables_that_contradict_each_other_are_refused() -> None:
    assert reading(JOB_TOTAL_GPUS="8", SBATCH_GPUS="8") == {"scale": 8}
    assert refusal(JOB_TOTAL_GPUS="8", SBATCH_GPUS="16") == [
        "SBATCH_GPUS is '16', but JOB_TOTAL_GPUS is '8'; unset one of them"
    ]


@pytest.mark.parametrize("workload", [LLAMA, MAVERICK])
def test_the_root_of_installation_is_no_option_of_a_launch(workload: str) -> None:
    """Every command reads it."""
    found = read_variables(VARIABLES, {"STAGE_PATH": "/lustre/stage"}, workload, OPTIONS)
    assert (found.options, found.notes) == ({}, ())


def test_a_variable_that_nothing_is_done_with_is_told_of_once() -> None:
    environ = {"NEMO_HOME": "/x", "HF_HOME": "/y", "HF_TOKEN": "hf_secret"}
    assert read_variables(VARIABLES, environ, LLAMA, OPTIONS).notes == (
        "NEMO_HOME is not needed: llmb's engine does not use NeMo",
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("JOB_TOTAL_GPU", "JOB_TOTAL_GPUS"),
        ("ENABLE_PROFIL", "ENABLE_PROFILE"),
        ("TIMELIMIT", "TIME_LIMIT"),
        ("Gpu_Type", "GPU_TYPE"),
        ("MODLE_SIZE", "MODEL_SIZE"),
        ("ENABLE_NCCL_TRACE", "ENABLE_NCCLTRACE"),
        ("MAX_STEP", "MAX_STEPS"),
        ("tp", "TP"),
    ],
)
def test_a_near_miss_is_told_of(name: str, meant: str) -> None:
    (warning,) = near_misses(VARIABLES, [name, "PATH"])
    assert warning == f"{name} is not a variable that llmb reads; did you mean {meant}?"


def test_what_other_programs_read_is_no_near_miss() -> None:
    assert list(near_misses(VARIABLES, [*OTHERS.split(), *(variable.name for variable in VARIABLES)])) == []


@pytest.mark.parametrize("slip", ["MODLESIZE", "MDEL_SIZE", "MODELS_SIZE", "NODEL_SIZE", "MODEL_SIZES", "model-size"])
def test_a_slip_of_any_kind_is_near(slip: str) -> None:
    (warning,) = near_misses(VARIABLES, [slip])
    assert warning.endswith("did you mean MODEL_SIZE?")


@pytest.mark.parametrize("name", ["", "TPS", "GB", "MBSX", "SIZE", "MODEL_NAME", "MY_JOB_TOTAL_GPUS", "MAX_EPOCHS"])
def test_another_name_is_not_near(name: str) -> None:
    assert list(near_misses(VARIABLES, [name])) == []


@given(st.sampled_from(VARIABLES), st.data())
def test_a_letter_more_or_less_is_near_where_the_name_is_long(variable: LaunchVariable, data: st.DataObject) -> None:
    name = variable.name
    place = data.draw(st.integers(0, len(name) - 1))
    known = {variable.name for variable in VARIABLES}
    for slip in (name[:place] + name[place + 1 :], f"{name[:place]}X{name[place:]}"):
        if slip not in known and len(name.replace("_", "")) >= 7:
            assert any(name in warning for warning in near_misses(VARIABLES, [slip])), slip


@given(st.text(), st.sampled_from(VARIABLES))
def test_no_value_breaks_the_reading(text: str, variable: LaunchVariable) -> None:
    try:
        value = variable.value(text, OPTIONS)
    except ValueError:
        return
    assert value is None or isinstance(value, int) or (text.isprintable() and str(value).lower() == text.lower())


def test_flags_are_written_in_many_ways() -> None:
    profile = next(variable for variable in VARIABLES if variable.name == "ENABLE_PROFILE")
    assert [profile.value(text, OPTIONS) for text in ("True", "1", "yes", "FALSE", "0", "no")] == [True] * 3 + [
        False
    ] * 3


def test_a_use_is_one_thing(tmp_path: Path) -> None:
    file = "- {name: X, meaning: m, type: flag, releases: ['1'], uses: [{sets: tp, ignored: why}]}\n"
    (tmp_path / "variables.yaml").write_text(file)
    with pytest.raises(UsageError, match=r"variables.yaml:1: 0.uses.0: .*one of sets, install"):
        _ = documented_variables(tmp_path / "variables.yaml")
