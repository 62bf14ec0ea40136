# SPDX-License-Identifier: Apache-2.0
"""Found by every interpreter that has this folder on PYTHONPATH: see ``slowed_runs``."""

import os

if "LLMB_TEST_SLOWED" in os.environ:
    from slowed_worker import slow_down

    slow_down(os.environ["LLMB_TEST_SLOWED"])
