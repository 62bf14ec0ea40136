# SPDX-License-Identifier: Apache-2.0
"""Where facts are read: files below a root folder, and programs, each with a time limit."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from llmb.tools import Said, ask_program


class Missing(NamedTuple):
    """A fact that is not known, and why."""

    reason: str


Ask = Callable[[Sequence[str], float], Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource:
    """A node; in tests, a recorded tree of files and the recorded output of programs."""

    root: Path = Path("/")
    ask: Ask = ask_program
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

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
