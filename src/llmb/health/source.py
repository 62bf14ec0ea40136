# SPDX-License-Identifier: Apache-2.0
"""What checks read: files below a root folder, and what programs print, each with a time limit."""

import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.runs.host import usable_cores
from llmb.system_files import SystemFiles
from llmb.tools import Said, ask_program

Ask = Callable[[Sequence[str], float], Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource(SystemFiles):
    """A node; in tests, a recorded tree of files, and recorded answers of programs and of the kernel."""

    ask: Ask = ask_program
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cores: Callable[[], int] = usable_cores
    rlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
    """Soft and hard limit of this process."""
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs


def printed_documents(text: str) -> dict[str, Any]:
    """What a probe printed, an object per line, also before it failed; start-up files of Python may print, too."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        found.update(document if isinstance(document, dict) else {})
    return found
