# SPDX-License-Identifier: Apache-2.0
from llmb.engine.environment import recorded_variables


def test_variables_that_may_hold_a_secret_are_not_recorded() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "HF_TOKEN": "hf_x",
        "LLMB_TOKEN": "x",
        "SLURM_JWT_KEY": "x",
        "SLURM_JWT": "x",
        "NVIDIA_PROXY": "https://someone:word@proxy:8080",
        "NVIDIA_API_KEY": "x",
        "CUDA_PASSWORD": "x",
        "HOME": "/root",
        "PATH": "/bin",
    }
    assert recorded_variables(environ) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
