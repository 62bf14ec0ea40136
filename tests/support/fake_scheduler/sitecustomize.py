# SPDX-License-Identifier: Apache-2.0
"""Every interpreter with this folder on PYTHONPATH finds it: what a change of the lookup of schedulers would do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))

from llmb.launch.scheduler_lookup import SCHEDULERS

SCHEDULERS["desk"] = ("desk_scheduler", "DeskScheduler")
