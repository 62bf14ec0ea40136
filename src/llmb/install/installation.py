# SPDX-License-Identifier: Apache-2.0
"""What an installation is made with, and the form of its steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.install.answers import Answers
from llmb.install.preparation import Preparations
from llmb.install.state import Journal

IMAGES = "images"

ImportImage = Callable[[str, Path, str, str | None], Path]
"""Gets an image's name, the folder for its file, the runtime and the nodes' architecture; returns the file, which
exists when it is complete."""


@dataclass(frozen=True, slots=True)
class InstallStep:
    """One step; ``do`` returns what was done, in words."""

    name: str
    title: str
    is_done: Callable[[], bool]
    do: Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What is installed, and by what means."""

    journal: Journal
    answers: Answers
    catalogue: Catalogue
    import_image: ImportImage | None = None
    """None where images cannot be imported here: an image is then used by the name it was given."""
    keep_settings: bool = False
    preparations: Preparations = field(default_factory=Preparations)

    @property
    def root(self) -> Path:
        return self.journal.root

    @property
    def image_folder(self) -> Path:
        return Path(self.answers.image_folder) if self.answers.image_folder else self.root / IMAGES
