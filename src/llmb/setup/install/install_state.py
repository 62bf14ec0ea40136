# SPDX-License-Identifier: Apache-2.0
"""Records the files of an installation before they are created, to resume or undo it however it ended."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import SerializeAsAny, ValidationError, field_validator

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.base.trust import STATE_FOLDER, check_inside, check_links, check_owner
from llmb.catalogue.records import Record
from llmb.jobs.locks import file_lock
from llmb.runs.folder import cannot_write, writing
from llmb.setup.install.answers import Answers, answers_schema
from llmb.setup.install.images import remove_image

STATE = "install_state.json"
LOCK = "install.lock"
PATIENCE_S = 2.0
SCHEMA_VERSION = 1


class InstalledItem(Record):
    """A file or a folder below the root that the installer creates."""

    path: str
    """The path relative to the root."""
    kind: Literal["folder", "file", "tree", "image"]
    """How to remove it: a folder if empty, a file if unchanged, a tree wholly, an image with leftovers."""
    sha256: tuple[str, ...] = ()
    """Checksums of all contents that were written to the file, the latest one last."""


class InstallState(Record):
    """The content of ``.llmb/install_state.json``."""

    schema_version: int = SCHEMA_VERSION
    root: str
    """The root at the last installation; absolute paths in the installed files begin with it."""
    made_root: bool
    """True if the installer created the root folder itself."""
    answers: SerializeAsAny[Answers]
    proven_python: str | None = None
    """The existing interpreter that was checked and has the packages for runs."""
    image: str | None = None
    """The file of the imported image."""
    made: tuple[InstalledItem, ...] = ()

    @field_validator("answers", mode="before")
    @classmethod
    def _with_those_of_schedulers(cls, value: object) -> object:
        return answers_schema().model_validate(value) if isinstance(value, dict) else value


def state_path(root: Path) -> Path:
    return root / STATE_FOLDER / STATE


def read_state(root: Path) -> InstallState | None:
    """Return the state, or None if nothing was installed.

    Raise UsageError if unreadable, or owned by an untrusted user.
    """
    path = state_path(root)
    check_links(path)
    check_owner(path, root)
    try:
        return InstallState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, NotADirectoryError) as error:
        raise UsageError(f"the state of the installation cannot be read: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        do = "if the file is damaged, or from another version of llmb, move it away, and run 'llmb install' again"
        raise UsageError("the file is not the state of an installation", where=str(path), do=do) from error


def put_file(path: Path, text: str, *, mode: int = 0o644, do: str | None = None) -> None:
    """Replace ``path`` atomically, and overwrite leftovers of a killed installer. Raise EnvironmentProblem if the file
    cannot be written."""
    temporary = partial_of(path)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise cannot_write(path, error, do) from error


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Journal:
    """The state of an installation, which only the process that holds the lock may change."""

    def __init__(self, root: Path, state: InstallState) -> None:
        self.root, self.state = root, state

    def save(self, **changes: object) -> None:
        changed = self.state.model_copy(update=changes)
        if changed != self.state:
            self.state = changed
            put_file(state_path(self.root), changed.model_dump_json(indent=1, exclude_none=True) + "\n")

    def folder(self, path: str) -> None:
        """Create a folder below the root, unless it exists."""
        if not (self.root / path).is_dir():
            self._intend(InstalledItem(path=path, kind="folder"))
            with writing(self.root / path):
                (self.root / path).mkdir(exist_ok=True)

    def file(self, path: str, text: str, *, mode: int = 0o644) -> None:
        """Write a file below the root; its folder must exist."""
        before = self.entry(path)
        written = before.sha256 if before else ()
        self._intend(
            InstalledItem(
                path=path, kind="file", sha256=(*(item for item in written if item != digest(text)), digest(text))
            )
        )
        put_file(self.root / path, text, mode=mode)

    def tree(self, path: str) -> Path:
        """Record a folder below the root for another program to create; remove an existing one, and return its path."""
        self._intend(InstalledItem(path=path, kind="tree"))
        shutil.rmtree(self.root / path, ignore_errors=True)
        return self.root / path

    def image(self, path: str) -> None:
        """Record a file that an import creates, unless it exists."""
        if not (self.root / path).exists():
            self._intend(InstalledItem(path=path, kind="image"))

    def entry(self, path: str) -> InstalledItem | None:
        return next((item for item in self.state.made if item.path == path), None)

    def is_unchanged(self, path: str) -> bool:
        """Return True if the installer wrote the file's current content."""
        item = self.entry(path)
        return item is not None and _digest_of(self.root / path) in item.sha256

    def forget(self, path: str) -> None:
        self.save(made=tuple(item for item in self.state.made if item.path != path))

    def _intend(self, item: InstalledItem) -> None:
        others = (other for other in self.state.made if other.path != item.path)
        if self.entry(item.path) != item:
            self.save(made=(*others, item))


@contextmanager
def opened_journal(root: Path, answers: Answers) -> Iterator[Journal]:
    """Yield the locked journal of ``root``, perhaps new.

    Raise EnvironmentProblem if locked or not writable, UsageError if unreadable.
    """
    _begin(root, answers)
    with locked_journal(root) as journal:
        yield journal


@contextmanager
def locked_journal(root: Path) -> Iterator[Journal]:
    """Yield the locked journal of an existing installation.

    Raise UsageError without a readable one, EnvironmentProblem if it cannot be locked.
    """
    if not state_path(root).exists():
        do = "pass the folder of an installation with --path, or set LLMB_INSTALL"
        raise UsageError("nothing was installed here", where=str(root), do=do)
    with file_lock(root / STATE_FOLDER / LOCK, PATIENCE_S, "installing"):
        partial_of(state_path(root)).unlink(missing_ok=True)
        state = read_state(root)
        if state is None:
            do = "to install again, run 'llmb install'"
            raise EnvironmentProblem("another process has just removed the installation", where=str(root), do=do)
        yield Journal(root, state)


def _begin(root: Path, answers: Answers) -> None:
    """Create the state and its missing folders; they appear together, because several processes may do this at once."""
    if state_path(root).exists():
        return
    state = InstallState(root=str(root), made_root=not root.exists(), answers=answers)
    if (root / STATE_FOLDER).exists():
        _write_state(root / STATE_FOLDER, state)
        return
    target = root / STATE_FOLDER if root.exists() else root
    items = [InstalledItem(path=STATE_FOLDER, kind="folder")] if root.exists() else []
    partial = partial_of(target)
    inner = partial if items else partial / STATE_FOLDER
    try:
        inner.mkdir(parents=True, exist_ok=True)
        _write_state(inner, state.model_copy(update={"made": tuple(items)}))
        partial.rename(target)
    except (OSError, EnvironmentProblem) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if state_path(root).exists():
            return  # another installer was faster
        if isinstance(error, OSError):
            raise cannot_write(target, error) from error
        raise


def _write_state(folder: Path, state: InstallState) -> None:
    put_file(folder / STATE, state.model_dump_json(indent=1, exclude_none=True) + "\n")


def remove(root: Path, items: Sequence[InstalledItem]) -> tuple[list[str], list[str]]:
    """Remove the items, last first; return the removed and the kept paths.

    Raise UsageError for paths outside, or OSError.
    """
    removed, remaining = list[str](), list[str]()
    for item in reversed(items):
        path = root / item.path
        if not path.exists() and not path.is_symlink() and item.kind != "image":
            continue
        check_inside(path, root)
        (removed if _removed(path, item) else remaining).append(item.path)
    return removed, remaining


def _removed(path: Path, item: InstalledItem) -> bool:
    if item.kind == "tree":
        shutil.rmtree(path)
    elif item.kind == "image":
        remove_image(path)  # also removes what a killed import left, if there is no image
    elif item.kind == "file":
        if _digest_of(path) not in item.sha256:
            return False
        path.unlink()
    else:
        try:
            path.rmdir()
        except OSError:
            return False  # something else is in it
    return True


def _digest_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def partial_of(path: Path) -> Path:
    """Return the temporary path that a file or folder has until it is complete."""
    return path.with_name(f".{path.name}.installing")
