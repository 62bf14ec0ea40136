# SPDX-License-Identifier: Apache-2.0
"""Small images, and programs that stand for Enroot and Apptainer, which tests do not have."""

import shutil
import struct
import subprocess
from pathlib import Path

HOW_TO_GET = "apt-get install squashfs-tools"


def has_squashfs() -> bool:
    return shutil.which("mksquashfs") is not None


def make_squashfs(path: Path, content: bytes = b"x" * 50_000) -> Path:
    """A real one."""
    folder = path.with_name(f"{path.name}.content")
    folder.mkdir()
    (folder / "file").write_bytes(content)
    command = ["mksquashfs", str(folder), str(path), "-quiet", "-no-progress", "-all-time", "0", "-mkfs-time", "0"]
    subprocess.run(command, check=True, capture_output=True)
    shutil.rmtree(folder)
    return path


def squashfs_bytes(content: bytes = b"x" * 5000) -> bytes:
    """The superblock as the kernel's documentation describes it, and something behind it."""
    used = 96 + len(content)
    head = struct.pack("<4sIIIIHHHHHHQQ", b"hsqs", 1, 0, 131072, 0, 1, 17, 0, 1, 4, 0, 0, used)
    return head.ljust(96, b"\0") + content


def sif_bytes(content: bytes = b"x" * 5000) -> bytes:
    """The header of sylabs/sif, and something behind it."""
    head = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes(16)
    return head + struct.pack("<8q", 0, 0, 47, 48, 128, 0, 128, len(content)) + content


def tool_script(image: Path, calls: Path, *, end: str = "") -> str:
    """Records its arguments, copies ``image`` to the output that it is given, and does ``end``.

    Of enroot the output is behind --output, of apptainer the second argument.
    """
    return f"""printf '%s\\n' "$*" >> {calls}
if [ "$1" = build ]; then out=$2; else while [ "$1" != --output ]; do shift; done; out=$2; fi
[ -e "$out" ] && {{ echo "[ERROR] File already exists: $out" >&2; exit 1; }}
echo "[INFO] Downloading 3 missing layers..." >&2
{end}
cp {image} "$out"
"""
