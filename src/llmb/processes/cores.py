# SPDX-License-Identifier: Apache-2.0
"""The CPU cores that this process may use."""

import os


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
