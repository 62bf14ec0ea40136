# SPDX-License-Identifier: Apache-2.0
"""A file that takes its name when it is complete."""

import os
from contextlib import closing
from pathlib import Path
from types import TracebackType

from llmb.runs.checksums import ChecksumWriter


class ReplacingFile(ChecksumWriter):
    """Written beside ``path``, and renamed to it when the block ends and the content is on disk."""

    def __init__(self, path: Path) -> None:
        self.target, self.partial = path, path.with_name(f".{path.name}.partial")
        super().__init__(self.partial)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with closing(self.raw):
                if kind is None:
                    self.flush()
                    os.fsync(self.fileno())
            if kind is None:
                self.partial.replace(self.target)
        finally:
            self.partial.unlink(missing_ok=True)
