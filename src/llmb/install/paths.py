# SPDX-License-Identifier: Apache-2.0
"""Whether an installation can be made in a folder."""

import os
from pathlib import Path

from llmb.install.answers import absolute

UNMOUNTABLE = ",:"
"""Container runtimes separate mounts by them."""


def path_problem(text: str) -> str | None:
    """What is wrong with the folder of an installation, in words."""
    path = absolute(text)
    if not Path(text).expanduser().is_absolute():
        return f"'{text}' is not absolute"
    normal = Path(os.path.normpath(path))
    if normal == Path(normal.anchor) or normal == Path.home():
        return f"'{text}' is not a folder of its own; give one below it"
    if any(letter in text for letter in UNMOUNTABLE) or not text.isprintable():
        return "a comma, a colon or a character that does not print is in the path; containers cannot mount it"
    try:
        return _place_problem(normal)
    except OSError as error:
        return f"'{text}' cannot be used: {error.strerror}"


def _place_problem(path: Path) -> str | None:
    if path.is_dir():
        return None if os.access(path, os.W_OK | os.X_OK) else f"you may not write to '{path}'"
    if path.exists() or path.is_symlink():
        return f"'{path}' is not a folder"
    if not path.parent.is_dir():
        return f"there is no folder '{path.parent}'; make it first, if the path is right"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"you may not write to '{path.parent}'"
    return None
