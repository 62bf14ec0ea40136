# SPDX-License-Identifier: Apache-2.0
"""Small images, and programs that stand for Enroot and Apptainer, which tests do not have."""

import struct
from pathlib import Path


def squashfs_bytes(content: bytes = b"x" * 5000) -> bytes:
    """The superblock as the kernel's documentation describes it, and something behind it."""
    used = 96 + len(content)
    head = struct.pack("<4sIIIIHHHHHHQQ", b"hsqs", 1, 0, 131072, 0, 1, 17, 0, 1, 4, 0, 0, used)
    return head.ljust(96, b"\0") + content


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
