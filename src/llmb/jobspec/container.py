# SPDX-License-Identifier: Apache-2.0
"""What a job's workers run in."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from llmb.catalogue.records import Record
from llmb.secrets import has_secret


def text_problems(text: str) -> Iterator[str]:
    """Why ``text`` cannot be written into a batch script."""
    if has_secret(text):
        yield "it looks like a secret, and is written into the batch script; use what the nodes have logged in to"
    elif not text.isprintable():
        yield f"{text!r} holds a character that does not print"


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
        problems = [problem for item in self._texts() for problem in text_problems(item)]
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
