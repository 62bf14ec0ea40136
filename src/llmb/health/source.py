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
from llmb.tools import Said, ask_program

Ask = Callable[[Sequence[str], float], Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource:
    """A node; in tests, a recorded tree of files, and recorded answers of programs and of the kernel."""

    root: Path = Path("/")
    ask: Ask = ask_program
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cores: Callable[[], int] = usable_cores
    rlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
    """Soft and hard limit of this process."""
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """None if it cannot be read, as many files of a device that is off."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except (OSError, ValueError):
            return None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        try:
            return int(text) if text else None
        except ValueError:
            return None

    def names(self, folder: str) -> list[str]:
        """What a folder contains, in natural order; empty if it cannot be read."""
        try:
            found = [path.name for path in self.path(folder).iterdir()]
        except OSError:
            return []
        return sorted(found, key=lambda name: (len(name), name))

    def exists(self, name: str) -> bool:
        try:
            return self.path(name).exists()
        except OSError:
            return False


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
