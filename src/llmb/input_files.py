# SPDX-License-Identifier: Apache-2.0
"""Opens files that others wrote. Only regular files are read: a pipe or a device may never end."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from llmb.errors import UsageError

MOST_TEXT_BYTES = 1 << 22
"""The largest file that is read as a whole."""

_KINDS = (
    (stat.S_ISDIR, "is a directory"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)


def open_file(path: Path, *, do: str | None = None) -> BinaryIO:
    """Opens a regular file, unbuffered. Raises UsageError for anything else, without waiting for a writer.

    ``do`` is the advice if there is no such file.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise UsageError("no such file or directory", where=str(path), do=do) from error
    except (OSError, ValueError) as error:  # a ValueError is a path that cannot be one
        what = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot be read: {what}", where=str(path)) from error
    if kind := not_regular(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"cannot be read: it {kind}, not a regular file", where=str(path))
    return os.fdopen(descriptor, "rb", buffering=0)


def not_regular(mode: int) -> str | None:
    """What a file is instead of a regular one, for use after its name; None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((text for is_kind, text in _KINDS if is_kind(mode)), "is no regular file")


def read_text_file(path: Path) -> bytes:
    """The whole content. Raises UsageError if it cannot be read, or is larger than ``MOST_TEXT_BYTES``."""
    with open_file(path) as stream:
        try:
            text = stream.read(MOST_TEXT_BYTES + 1)
            while 0 < len(text) <= MOST_TEXT_BYTES and (more := stream.read(MOST_TEXT_BYTES + 1 - len(text))):
                text += more
        except OSError as error:
            raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(text) > MOST_TEXT_BYTES:
        raise UsageError(f"cannot be read: it is larger than {MOST_TEXT_BYTES >> 20} MiB", where=str(path))
    return text
