# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has what the engine needs."""

import shutil
from importlib.util import find_spec

from llmb.errors import EnvironmentProblem
from llmb.programs.nsys import NSYS
from llmb.runs.plan import Plan


def check_here(plan: Plan) -> None:
    """Raises EnvironmentProblem where a program is missing that ``plan`` needs."""
    profile = plan.profile
    required = profile and profile.profiler == "nsys" and (profile.gpu_metrics or not profile.or_torch)
    if required and shutil.which(NSYS) is None:
        raise EnvironmentProblem(
            "Nsight Systems was requested, but there is no 'nsys' on the PATH",
            do="install it, put it on the PATH, or take --profiler torch without --profile-gpu-metrics",
        )
    if find_spec("torch") is None:
        raise EnvironmentProblem("training needs torch, which is not installed", do="pip install 'llmb[engine]'")
