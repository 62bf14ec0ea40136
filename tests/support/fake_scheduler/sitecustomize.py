# SPDX-License-Identifier: Apache-2.0
"""Found by every interpreter that has this folder on PYTHONPATH: what a change of ``schedulers/lookup.py`` would do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))

from llmb.schedulers.lookup import SCHEDULERS

SCHEDULERS["desk"] = ("desk_scheduler", "DeskScheduler")
