# SPDX-License-Identifier: Apache-2.0
"""What a job's workers run in."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from llmb.catalogue.records import Record


class ContainerSettings(Record):
    """What the workers run in."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    image: str | None = None
    mounts: tuple[str, ...] = ()
    """``path`` or ``path:path inside[:options]``; the install root and the checkpoints' folders are always mounted."""
    python: str = "python3"
    """The interpreter inside that has llmb and torch."""

    @model_validator(mode="after")
    def _can_be_started(self) -> Self:
        problems = [
            f"{item!r} holds a character that does not print" for item in self._texts() if not item.isprintable()
        ]
        problems += [
            f"the mount '{mount}' holds a comma, which separates mounts" for mount in self.mounts if "," in mount
        ]
        if self.runtime != "none" and not self.image:
            problems.append(f"{self.runtime} needs an image")
        if self.runtime == "none" and self.image:
            problems.append("an image needs a runtime: pyxis or apptainer")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _texts(self) -> Iterator[str]:
        yield from (self.image or "", *self.mounts, self.python)
