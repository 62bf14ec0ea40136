# SPDX-License-Identifier: Apache-2.0
"""Decides by their owners whether to trust files that llmb acts on, as Git does (``safe.directory``)."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from llmb.base.errors import UsageError

ADMINISTRATOR = 0
SHARED = WORKLOADS, ACCEPTANCES, STATE_FOLDER = "workloads", "acceptance", ".llmb"
"""Folders in the install root; ``STATE_FOLDER`` has llmb's own records."""


def config_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the user's own files, which need not exist; None if no variable sets it."""
    base = environ.get("XDG_CONFIG_HOME", "").strip() or (environ.get("HOME") and f"{environ['HOME']}/.config")
    return Path(base) / "llmb" if base else None


def check_owner(path: Path, root: Path | None = None, *, do: str | None = None) -> None:
    """Raise UsageError if another user, except the administrator or ``root``'s owner, owns ``path`` or a link there."""
    trusted = (ADMINISTRATOR, os.geteuid(), root and _owner(root))
    for owner in (_link_owner(path), _owner(path)):
        if owner not in (None, *trusted):
            what = f"this belongs to another user, {_name(owner)}; llmb would act on it as {_name(os.geteuid())}"
            raise UsageError(what, where=str(path), do=do or "check its content, then use a copy of your own")


def foreign_link(path: Path) -> Path | None:
    """Return another user's link on the way to ``path``, below an install root; None if there is none.

    In a root that several users can write to, one user's link must not redirect another user's commands. Links of the
    root's owner and of the system's administrator are followed, and so are all links above the root.
    """
    places = [path, *path.parents]
    depth = next((number for number, place in enumerate(places) if place.name in SHARED), None)
    if depth is None or depth + 1 == len(places):
        return None
    trusted = (ADMINISTRATOR, os.geteuid(), _owner(places[depth + 1]))
    return next((place for place in places[: depth + 1] if _link_owner(place) not in (None, *trusted)), None)


def check_links(path: Path) -> None:
    """Raise UsageError if the way to ``path`` leads through another user's link."""
    if link := foreign_link(path):
        do = "ask its owner to replace it with a file or folder, or the owner of the install root to recreate it"
        raise UsageError("this is another user's link, which is not followed", where=str(link), do=do)


def check_inside(path: Path, root: Path) -> None:
    """Raise UsageError if removing ``path`` would remove ``root`` or something outside it, once links are resolved."""
    below = path.parent.resolve()
    if path.name in ("", "..") or path == root or not below.is_relative_to(root.resolve()):
        do = "nothing was removed there; inspect the path, and remove it yourself if you do not need it"
        raise UsageError("this is not below the install root, once links are resolved", where=str(path), do=do)


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None  # the code that uses the path gets the same error


def _link_owner(place: Path) -> int | None:
    try:
        return place.lstat().st_uid if place.is_symlink() else None
    except OSError:
        return None


def _name(user: int | None) -> str:
    try:
        return pwd.getpwuid(user or 0).pw_name
    except KeyError:
        return f"user {user}"
