# SPDX-License-Identifier: Apache-2.0
"""The link ``latest`` in the install root, to the folder of the run that was started or submitted last.

It is for people: no command of llmb follows it where others may have written it.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from llmb.runs.folder import RunFolder

LATEST = "latest"


def link_latest(install: Path, folder: RunFolder) -> None:
    """Replaces the link at once. A file that is not a link stays; where no link can be written, there is none."""
    link = install / LATEST
    if os.path.lexists(link) and not link.is_symlink():
        return
    temporary = install / f".{LATEST}.{secrets.token_hex(4)}"
    try:
        temporary.symlink_to(os.path.relpath(folder.path, install), target_is_directory=True)
        temporary.replace(link)
    except OSError:  # such as another user's, in a folder where only its owner may replace it
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
