# SPDX-License-Identifier: Apache-2.0
"""The type of a folder's file system: SQLite's write-ahead log requires shared memory, so a single host."""

from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
# Visible to several hosts. File systems mounted through FUSE count as shared, too.
SHARED = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
    ]
)


def is_shared(folder: Path) -> bool:
    """Whether other hosts may use ``folder``, too. Without a list of mounts it counts as local."""
    try:
        return shared_in(MOUNTS.read_text(), folder.resolve())
    except OSError:
        return False


def shared_in(mounts: str, folder: Path) -> bool:
    """The same for the text of ``/proc/self/mountinfo``, whose lines are in the order in which they were mounted."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape"))  # a blank is written as \040
        if folder.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = after.split()[0], len(point.parts)
    return kind in SHARED or kind.startswith("fuse")
