# SPDX-License-Identifier: Apache-2.0
"""Progress of reading many or large logs, on a terminal."""

import sys
from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from llmb.logs.files import FoundFiles

FROM_FILES = 500
FROM_BYTES = 1 << 29
Read = TypeVar("Read")


def reading_progress(files: Iterable[Read], found: FoundFiles) -> Iterable[Read]:
    """``files``, with a bar on stderr if there are many of them."""
    many = len(found.logs) >= FROM_FILES or found.total_bytes >= FROM_BYTES
    if not many or not sys.stderr.isatty():
        return files
    return track(files, "Reading", total=len(found.logs), console=Console(stderr=True), transient=True)
