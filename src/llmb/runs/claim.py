# SPDX-License-Identifier: Apache-2.0
"""Claims the folders that a run will write to, and tries them, before anything is trained."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from llmb.errors import EnvironmentProblem
from llmb.runs.experiment import experiment_name, run_parent
from llmb.runs.folder import RunFolder, create_numbered, writing
from llmb.runs.plan import Plan
from llmb.trust import check_links

PROBE = ".probe"
PROBE_BYTES = 4096


def create_run_folder(install: Path, plan: Plan, name: str | None = None) -> RunFolder:
    """A new, empty folder of a run (``stamped_folder``), and the one that it saves to. Raises EnvironmentProblem.

    ``name`` is that of the experiment, by default that of llmb's own engine.
    """
    own = name or experiment_name(plan)
    return stamped_folder(run_parent(install, plan, own), own, lambda run: claim_checkpoints(run, plan))


def stamped_folder(parent: Path, name: str, claim: Callable[[RunFolder], object] = lambda _run: None) -> RunFolder:
    """A new, empty folder ``<name>_<seconds>/<name>`` in ``parent``, for which ``claim`` raises no FileExistsError.

    Of several that begin in the same second, the second one has ``-2`` behind the seconds, and so on. Raises
    UsageError for another user's link, EnvironmentProblem where nothing can be written.
    """
    check_links(parent)

    def create(stamped: Path) -> None:
        stamped.mkdir()
        try:
            claim(RunFolder(stamped / name))
        except (FileExistsError, EnvironmentProblem):
            stamped.rmdir()
            raise

    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(create_numbered(parent, f"{name}_{int(time.time())}", create) / name)
        folder.path.mkdir()
    return folder


def claim_checkpoints(run: RunFolder, plan: Plan) -> None:
    """Creates the run's own folder in the plan's directory for checkpoints, if it has one, and tries it.

    Raises FileExistsError if another run has it, EnvironmentProblem if nothing can be written there.
    """
    if plan.checkpoint_dir is None:
        return
    folder = run.checkpoints_of(plan)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_save_to(folder.parent, error) from error
    try:
        folder.mkdir()
    except FileExistsError:
        raise
    except OSError as error:
        raise cannot_save_to(folder, error) from error
    try:
        probe(folder)
    except OSError as error:
        folder.rmdir()
        raise cannot_save_to(folder, error) from error


def release_checkpoints(run: RunFolder, plan: Plan) -> None:
    """Removes the claimed folder of a run that does not begin, if nothing is in it."""
    folder = run.checkpoints_of(plan)
    if plan.checkpoint_dir is not None and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def probe(folder: Path) -> None:
    """Whether a file can be written to an existing folder. Raises OSError."""
    path = folder / f"{PROBE}-{os.getpid()}"
    probe_file(path)
    path.unlink(missing_ok=True)  # a process of another node with the same id may have removed it


def probe_file(path: Path) -> None:
    """Writes a small file, to the disk. Raises OSError, and leaves nothing then."""
    try:
        with path.open("wb") as stream:
            stream.write(bytes(PROBE_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def cannot_save_to(folder: Path, error: OSError) -> EnvironmentProblem:
    advice = "give --checkpoint-dir a folder in which files can be created, or leave it out"
    reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
    what = f"checkpoints cannot be saved there: {reason}"
    return EnvironmentProblem(what, where=str(error.filename or folder), do=advice)
