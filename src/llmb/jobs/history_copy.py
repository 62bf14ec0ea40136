# SPDX-License-Identifier: Apache-2.0
"""A copy of the history in memory, for whoever must not write the file: nothing is created beside it."""

import shutil
import sqlite3
import tempfile
from pathlib import Path
from urllib.parse import quote

_BESIDE = ("-wal", "-journal")
_FORMAT_BYTE, _WRITE_AHEAD = 18, 2
"""Of the file's header: how it is written, and the way of version 0.1, which readers join by writing, too."""


def copied(path: Path) -> sqlite3.Connection:
    """The database at ``path``, in memory. Raises OSError and sqlite3.Error."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    try:
        if _is_at_rest(path):
            _load(f"file:{quote(str(path))}?mode=ro", memory)
        else:  # what is beside it belongs to it, and SQLite takes that over by writing
            with tempfile.TemporaryDirectory() as folder:
                for part in ("", *_BESIDE):
                    if Path(f"{path}{part}").exists():
                        shutil.copyfile(f"{path}{part}", f"{folder}/jobs{part}")
                _load(f"file:{quote(folder)}/jobs", memory)
    except BaseException:
        memory.close()
        raise
    return memory


def _is_at_rest(path: Path) -> bool:
    with path.open("rb") as stream:
        header = stream.read(_FORMAT_BYTE + 1)
    beside = (Path(f"{path}{part}") for part in _BESIDE)
    return header[-1:] != bytes([_WRITE_AHEAD]) and not any(part.exists() and part.stat().st_size for part in beside)


def _load(uri: str, memory: sqlite3.Connection) -> None:
    source = sqlite3.connect(uri, uri=True)
    try:
        source.backup(memory)
    finally:
        source.close()
