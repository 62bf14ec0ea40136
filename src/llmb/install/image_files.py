# SPDX-License-Identifier: Apache-2.0
"""Files of images: whether one is whole, its checksum, and what lies beside it."""

import glob
import hashlib
import os
import shutil
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

ImageKind = Literal["squashfs", "SIF", "OCI archive", "Docker archive"]

BLOCK = 2**22
SQUASHFS_BYTES, SIF_BYTES = 96, 128
SQUASHFS_MAGIC, SQUASHFS_VERSION = b"hsqs", 4
SIF_MAGIC, SIF_MAGIC_AT = b"SIF_MAGIC\0", 32
"""Behind the line that starts it as a script."""


def image_kind(path: Path) -> ImageKind | None:
    """By the content; None for what is no image. Raises OSError."""
    head = _head(path)
    if head[: len(SQUASHFS_MAGIC)] == SQUASHFS_MAGIC:
        return "squashfs"
    if head[SIF_MAGIC_AT : SIF_MAGIC_AT + len(SIF_MAGIC)] == SIF_MAGIC:
        return "SIF"
    return _archive_kind(path)


def image_problem(path: Path) -> str | None:
    """Why a file is no whole squashfs or SIF image; None if it is one. Reads the first bytes alone. Raises OSError.

    mksquashfs writes the superblock last, and Apptainer the header: a file that is half-written lacks them, and one
    that was cut holds less than they say.
    """
    head, size = _head(path), path.stat().st_size
    if head[: len(SQUASHFS_MAGIC)] == SQUASHFS_MAGIC:
        return _squashfs_problem(head, size)
    if head[SIF_MAGIC_AT : SIF_MAGIC_AT + len(SIF_MAGIC)] == SIF_MAGIC:
        return _sif_problem(head, size)
    return "it does not begin as an image does; it may be half-written"


def _squashfs_problem(head: bytes, size: int) -> str | None:
    if len(head) < SQUASHFS_BYTES:
        return f"it has {size} bytes"
    (version,) = struct.unpack_from("<H", head, 28)
    if version != SQUASHFS_VERSION:
        return f"it is of version {version} of squashfs"
    (used,) = struct.unpack_from("<Q", head, 40)
    return _cut(used, size)


def _sif_problem(head: bytes, size: int) -> str | None:
    if len(head) < SIF_BYTES:
        return f"it has {size} bytes"
    offset, length = struct.unpack_from("<qq", head, 112)
    return _cut(offset + length, size)


def _cut(needed: int, size: int) -> str | None:
    if needed < SQUASHFS_BYTES:
        return "its header is damaged"
    return f"it has {size:,} bytes of {needed:,}" if size < needed else None


def _head(path: Path) -> bytes:
    with path.open("rb", buffering=0) as stream:
        return stream.read(SIF_BYTES)


def _archive_kind(path: Path) -> ImageKind | None:
    """By the members at its top."""
    try:
        with tarfile.open(path) as archive:
            names = {member.name.removeprefix("./") for member in archive}
    except (tarfile.TarError, EOFError):
        return None
    if "manifest.json" in names:  # Docker's own archives hold both since version 25
        return "Docker archive"
    return "OCI archive" if "oci-layout" in names else None


def sha256_of(path: Path, on_bytes: Callable[[int], object] = lambda _count: None) -> str:
    """Reads the whole file. Raises OSError."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        block = bytearray(BLOCK)
        while size := stream.readinto(block):
            found.update(memoryview(block)[:size])
            on_bytes(size)
    return found.hexdigest()


def checksum_file(image: Path) -> Path:
    return image.with_name(f"{image.name}.sha256")


def lock_file(image: Path) -> Path:
    """Stays: whoever removed it could remove what another process has just locked."""
    return image.with_name(f".{image.name}.lock")


def read_checksum(image: Path) -> str | None:
    """The checksum beside an image, in the form of sha256sum; None if there is none that can be read."""
    try:
        words = checksum_file(image).read_text().split()
    except (OSError, UnicodeDecodeError):
        return None
    is_one = len(words) == 2 and len(words[0]) == 64 and words[1].lstrip("*") == image.name
    return words[0] if is_one else None


def write_checksum(image: Path, checksum: str) -> None:
    """At once. Raises OSError."""
    partial = _checksum_partial(image)
    with partial.open("w") as stream:
        stream.write(f"{checksum}  {image.name}\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(checksum_file(image))


def _checksum_partial(image: Path) -> Path:
    return image.with_name(f".{image.name}.sha256.partial")


def partial_prefix(image: Path) -> str:
    """How the names of folders begin in which an image is made; the host and the process follow."""
    return f".{image.name}.importing."


def leftovers(image: Path) -> Sequence[Path]:
    """Of imports that are at work, or were killed."""
    return sorted(image.parent.glob(f"{glob.escape(partial_prefix(image))}*"))


def is_whole(image: Path) -> bool:
    """Whether there is an image that can be taken."""
    try:
        return image_problem(image) is None
    except OSError:
        return False


def remove_image(image: Path) -> None:
    """With all that lies beside it. Raises OSError."""
    for left in leftovers(image):
        shutil.rmtree(left)
    for path in (image, checksum_file(image), _checksum_partial(image), lock_file(image)):
        path.unlink(missing_ok=True)
