# SPDX-License-Identifier: Apache-2.0
"""Opens untrusted files, except pipes and devices, whose reads may never end. Also reads /proc and /sys."""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmb.base.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFiles:
    """Files of /proc and /sys below ``root``. Files that cannot be read raise no error."""

    root: Path = Path("/")

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Return the content without surrounding whitespace; None if it cannot be read."""
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
        """Return the names in a folder, with cpu2 before cpu10; an empty list if the folder cannot be read."""
        try:
            names = [path.name for path in self.path(folder).iterdir()]
        except OSError:
            return []
        return sorted(names, key=lambda name: (len(name), name))

    def exists(self, name: str) -> bool:
        try:
            return self.path(name).exists()
        except OSError:
            return False


MOST_SHOWN, READABLE = 80, "pass a regular file that you may read"
MOST_TEXT_BYTES = 1 << 22
"""Default size limit of a text file that is read as a whole, such as settings."""
MOST_JSON_BYTES = 1 << 26
"""Size limit of a JSON file."""
MOST_VALUES = 1 << 21
"""Limit of values in a JSON file; the record of a run on 20,000 GPUs has 1.5 million."""
MOST_VALUES_IN_LINE = 1 << 17
"""Limit of values in a line of JSON; a line about 20,000 ranks has 100,000 values."""

_KINDS = (
    (stat.S_ISDIR, "is a directory"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)


def open_regular(path: Path, *, buffering: int = 0) -> BinaryIO:
    """Open a regular file, by default unbuffered; raise OSError for another kind, even for a pipe without a writer."""
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if kind := not_regular(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it {kind}, not a regular file", str(path))
    return os.fdopen(descriptor, "rb", buffering=buffering)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file; raise OSError if it is larger than ``most_bytes`` or cannot be read."""
    with open_regular(path) as stream:
        return read_up_to(stream, most_bytes, path)


def read_up_to(stream: BinaryIO, most_bytes: int, path: Path) -> bytes:
    if os.fstat(stream.fileno()).st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
    return stream.read()


def open_file(path: Path, *, do: str | None = None) -> BinaryIO:
    """Open a regular file; raise UsageError if that fails. ``do`` is the advice if it is missing."""
    try:
        return open_regular(path)
    except FileNotFoundError as error:
        raise UsageError("no such file or directory", where=str(path), do=do or "pass an existing file") from error
    except (OSError, ValueError) as error:  # ValueError: the path contains a null character
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the file cannot be read: {why}", where=str(path), do=READABLE) from error


def parse_path(text: str | Path) -> Path:
    """Return ``text`` as a path, with ``~`` expanded; raise UsageError if it cannot be a path."""
    try:
        path = Path(text).expanduser()
        path.lstat()
    except (RuntimeError, ValueError) as error:  # ~NAME of an unknown user, or a null character
        raise UsageError(f"this path cannot be used: {error}", where=str(text)[:MOST_SHOWN]) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError("this path cannot be used: it is too long", where=str(text)[:MOST_SHOWN]) from error
    return path


def check_reachable(path: Path) -> None:
    """Raise UsageError if permissions forbid entering a folder on the way to ``path``, or ``path`` itself."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            (path / "..").stat()
    except PermissionError as error:
        what, do = f"the path cannot be read: {error.strerror}", "ask its owner for permission to read it"
        raise UsageError(what, where=str(path), do=do) from error
    except (OSError, ValueError):
        return  # the code that uses the path reports other errors


def not_regular(mode: int) -> str | None:
    """Return a predicate such as ``is a pipe``; None for the mode of a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((text for is_kind, text in _KINDS if is_kind(mode)), "is of an unknown type")


def check_values(text: bytes, most: int = MOST_VALUES) -> None:
    """Raise ValueError if JSON has more than ``most`` commas and opening brackets, which limits the memory to parse
    it."""
    if sum(map(text.count, (b",", b"{", b"["))) > most:
        raise ValueError(f"it has more than {most:,} values")


def list_folder(path: Path) -> list[Path]:
    """Return the paths in a folder; raise UsageError if it cannot be listed."""
    try:
        return list(path.iterdir())
    except OSError as error:
        raise UsageError(f"the folder cannot be listed: {error.strerror}", where=str(path)) from error


def read_text_file(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """Return the content of a file; raise UsageError if it is larger than ``most_bytes`` or cannot be read."""
    with open_file(path) as stream:
        try:
            return read_up_to(stream, most_bytes, path)
        except OSError as error:
            raise UsageError(f"the file cannot be read: {error.strerror}", where=str(path)) from error
