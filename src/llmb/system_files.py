# SPDX-License-Identifier: Apache-2.0
"""Reads what Linux shows of this machine as files, below a root folder; in tests, a recorded tree of them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFiles:
    """The files of /proc and /sys. Nothing raises for what is missing: devices that are off cannot be read."""

    root: Path = Path("/")

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
