# SPDX-License-Identifier: Apache-2.0
"""Runs of ``llmb run`` on GPUs that are not there: nothing computes, and all else is a run's own.

``nvidia-smi`` is a script, and a start file of Python makes the workers believe that they have GPUs and NCCL, as
``pretended/pretended_worker.py`` tells. Losses and gradient norms are made up there.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).with_name("pretended")
ROOT = Path(__file__).parents[2]
NAME, LOSS, NORM, PEAK_BYTES = "NVIDIA H200", 2.5, 0.5, 5 * 2**30
DRIVER = "580.95.05"
STATE = "Enabled, Disabled, Enabled, 700, 700, 300, 50, 1980, 3201, 1980, 3201, 1980, 3201, 0x0, 0, 0, 0, 0, 0"


def pretended(gpus: int, programs: Path) -> dict[str, str]:
    """Variables of a run on so many GPUs; ``programs`` is a folder for its ``nvidia-smi``."""
    programs.mkdir(exist_ok=True)
    script = programs / "nvidia-smi"
    states = [f"{gpu}, {DRIVER}, GPU-{gpu:08d}, {NAME}, {STATE}" for gpu in range(gpus)]
    names, rows = ("\n".join(lines) for lines in ([NAME] * gpus, states))
    script.write_text(f'#!/bin/sh\ncase "$*" in *query-gpu=name*) echo "{names}";; *) echo "{rows}";; esac\n')
    script.chmod(0o755)
    paths = [FOLDER, ROOT / "src", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "LLMB_TEST_PRETENDED": "1",
    }
