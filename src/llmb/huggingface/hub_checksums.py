# SPDX-License-Identifier: Apache-2.0
"""Checksums that the Hugging Face hub has of files, as its clients leave them beside a download."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

BLOCK = 2**22
SHA256 = re.compile(r"[0-9a-f]{64}")
LOCAL_METADATA = Path(".cache", "huggingface", "download")
"""Below the folder of ``hf download --local-dir``."""


def hub_checksums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of those files of which the hub's is known: in its cache, a file is a link to its checksum."""
    found = {name: _linked(folder / name) or _recorded(folder, name) for name in names}
    return {name: checksum for name, checksum in found.items() if checksum}


def corrupt_files(folder: Path, checksums: dict[str, str], threads: int, on_block: Callable[[int], None]) -> list[str]:
    """Names of the files whose content is not the hub's; ``on_block`` is called with the bytes of each block.

    Raises OSError.
    """

    ended = Event()

    def is_corrupt(name: str) -> bool:
        digest = hashlib.sha256()
        for block in _blocks(folder / name):
            if ended.is_set():
                break
            digest.update(block)
            on_block(len(block))
        return digest.hexdigest() != checksums[name]

    with ThreadPoolExecutor(threads, thread_name_prefix="sha256") as pool:
        try:
            return [name for name, corrupt in zip(checksums, pool.map(is_corrupt, checksums), strict=True) if corrupt]
        finally:
            ended.set()  # an interrupted command does not wait for the other files


def _linked(path: Path) -> str | None:
    target = path.resolve()
    is_blob = path.is_symlink() and target.parent.name == "blobs"
    return target.name if is_blob and SHA256.fullmatch(target.name) else None


def _recorded(folder: Path, name: str) -> str | None:
    """Its lines are the commit, the checksum and the time of the download; a file that was changed since is another."""
    try:
        _, checksum, downloaded = (folder / LOCAL_METADATA / f"{name}.metadata").read_text().split()
        changed = (folder / name).stat().st_mtime > float(downloaded) + 1
    except (OSError, ValueError):
        return None
    return checksum if SHA256.fullmatch(checksum) and not changed else None


def _blocks(path: Path) -> Iterator[memoryview]:
    block = bytearray(BLOCK)
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(block):
            yield memoryview(block)[:size]
