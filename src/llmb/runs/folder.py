# SPDX-License-Identifier: Apache-2.0
"""The files of a run's folder, the install root, and functions that write, read and validate files."""

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.base.input_files import MOST_JSON_BYTES, check_values, open_regular, read_regular
from llmb.base.missing import Missing
from llmb.base.record import first_problem
from llmb.base.shown_text import printable
from llmb.base.trust import check_links, check_owner, config_folder
from llmb.readers.profiles import NCCL_FOLDER, NETWORK_FOLDER, NSYS_FOLDER, TORCH_FOLDER

if TYPE_CHECKING:
    from llmb.runs.plan import Plan

Shape = TypeVar("Shape")
Content = TypeVar("Content")
UNREADABLE = (OSError, ValueError, LookupError, ArithmeticError)
"""The errors that reading an untrusted file, or using its content, may raise."""
MOST_SHOWN = 200
LATEST = "latest"
CLUSTER_CONFIG = "cluster_config.yaml"
ROOT_KEY = "install_root"
VBOOST_FILE = "vboost.json"
ABSOLUTE = "begin the path with / or ~"
"""Advice for a path in the user's own defaults."""
ROOT_VARIABLES = ("LLMB_INSTALL", "STAGE_PATH")
"""Variables of the reference documents that name the install root; the second is from the oldest document."""
_OTHER = "or set LLMB_INSTALL to a folder"
_FULL = f"free some space, {_OTHER} on another disk"
_NOT_YOURS = f"change the owner or the permissions of the folder, {_OTHER} where you may write"
_NO_FOLDER = f"a part of the path is a file: remove it, {_OTHER} elsewhere"
WRITE_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _NOT_YOURS,
    errno.EPERM: _NOT_YOURS,
    errno.EROFS: f"the file system is read-only: mount it for writing, {_OTHER} on another one",
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,
    errno.ENAMETOOLONG: "set LLMB_INSTALL to a folder with a shorter path",
}


def log_name(folder: str) -> str:
    """Return the name of the log in a run folder named ``folder``."""
    return f"log-{folder}.out"


class Inside:
    """A file or a folder with a fixed name in a run's folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: "RunFolder", _kind: type) -> Path:
        return folder.path / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run, below ``path``."""

    path: Path
    record = Inside("run.json")
    steps = Inside("metrics.jsonl")
    rank_times = Inside("rank_times.jsonl")
    """Parts of each rank's time per step or group of steps; for the engine with several ranks."""
    expert_load = Inside("expert_load.json")
    """Each expert's fraction of the router's choices in its layer, in the last attempt; for a model with experts."""
    torch_profile = Inside(TORCH_FOLDER)
    """Traces of the PyTorch profiler, one per profiled rank."""
    nsys_profile = Inside(NSYS_FOLDER)
    """Nsight Systems reports, one per profiled rank."""
    nccl_trace = Inside(NCCL_FOLDER)
    """NCCL's own logs, one per process."""
    nccl_network = Inside(NETWORK_FOLDER)
    """NCCL's lines about the network, one file per node; for the engine on GPUs of several nodes, if not traced."""
    nccl_topology = Inside("nccl_topology.xml")
    """The GPUs, NICs and links of the first node, as NCCL detected them; for the engine on GPUs."""
    breakdown = Inside("breakdown.json")
    """The breakdown of the time of a profiled step."""
    resources = Inside("resources")
    """The samples of GPUs and nodes in one file per node and, until the run ends, the nodes' settings."""
    checkpoints = Inside("checkpoints")
    """Created with the first checkpoint that is saved here."""
    checkpoint_times = Inside("checkpoints.jsonl")
    """Times of saves and loads; exists after the first."""
    environment = Inside("environment.json")
    """Written by the workers; its content moves into the record when the run ends."""
    vboost = Inside(VBOOST_FILE)
    """The result of ``nvidia-smi boost-slider`` in the batch script; moves into the record when the run ends."""
    stall = Inside("stall.txt")
    """Written by a worker that ends a hung run, for the launcher; removed when the run ends."""
    job = Inside("job.json")
    """The job that the run was submitted as, written after its submission or its import."""
    imported = Inside("imported.json")
    """The origin of a run that was imported from an archive."""
    launch_output = Inside("launch.out")
    """Output of the call that queued a program's own script; only for a run that is queued this way."""
    job_spec = Inside("job_spec.json")
    """All decisions about the job, made before its submission."""
    task = Inside("task.json")
    """Record of a job that trains nothing, instead of ``record``."""
    job_end = Inside("job_end.json")
    """The end of the batch script, written by the script itself unless it is killed."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def log(self) -> Path:
        return self.path / log_name(self.name)

    @property
    def batch_script(self) -> Path:
        """Return the path of the batch script of a run that was submitted to a scheduler."""
        return self.path / f"sbatch_{self.name}.sh"

    @property
    def batch_output(self) -> Path:
        """Return the path of the output of the batch script and the scheduler; workers write ``log``."""
        return self.path / f"sbatch_{self.name}.out"

    def steps_of_attempt(self, number: int) -> Path:
        """Return the file with the run's steps up to the end of attempt ``number``; the next attempt writes it."""
        return self.path / f"metrics-attempt{number}.jsonl"

    def resources_of(self, node: str) -> Path:
        return self.resources / f"{node}.jsonl"

    def checkpoints_of(self, plan: "Plan") -> Path:
        """Return the folder of checkpoints, in the run folder or, named like that folder's parent, in the plan's
        ``checkpoint_dir``."""
        return Path(plan.checkpoint_dir) / self.path.parent.name if plan.checkpoint_dir else self.checkpoints


@dataclass(frozen=True, slots=True)
class InstallRoot:
    """The folder of all installed and stored files."""

    path: Path
    chosen_by: str | None
    """The variable or file that set it; None for the default."""


def chosen_root(environ: Mapping[str, str], start: Path) -> InstallRoot:
    """Return the root from variables, a cluster_config.yaml at or above ``start``, the user's defaults, or ~/.llmb.

    Raise UsageError if unusable.
    """
    texts = {name: text for name in ROOT_VARIABLES if (text := environ.get(name, "").strip())}
    roots = {name: Path(text).expanduser().absolute() for name, text in texts.items()}
    if len(set(roots.values())) > 1:
        what = ", but ".join(f"{name} is '{text}'" for name, text in texts.items())
        raise UsageError(what, do="unset one of them")
    for name, path in roots.items():
        return InstallRoot(path, name)
    for folder in (start, *start.parents):
        if (folder / CLUSTER_CONFIG).is_file():
            check_owner(folder, do=f"set {ROOT_VARIABLES[0]}={folder} to use it anyway, or run llmb elsewhere")
            check_owner(folder / CLUSTER_CONFIG, do="check it, then replace it with your copy, or run llmb elsewhere")
            return InstallRoot(folder, CLUSTER_CONFIG)
    config = user_config(environ)
    if config and config.exists() and (root := user_root(config)):
        return InstallRoot(root, str(config))
    return InstallRoot(Path(environ.get("HOME", "~")).expanduser() / ".llmb", None)


def user_config(environ: Mapping[str, str]) -> Path | None:
    """Return the file of the user's own defaults, which need not exist; None without HOME and XDG_CONFIG_HOME."""
    folder = config_folder(environ)
    return folder / "config.yaml" if folder else None


def user_root(path: Path) -> Path | None:
    """Return the install root in the file ``path``, or None.

    Raise UsageError if it is relative, or the file unusable.
    """
    from llmb.catalogue.data_files import read_data  # few users have such a file

    check_owner(path)
    data = read_data(path)
    root = data.get(ROOT_KEY) if isinstance(data, dict) else None
    if not isinstance(root, str) or not root:
        return None
    if not root.startswith(("/", "~")):
        what = f"{ROOT_KEY} is '{root}', which depends on the working directory"
        raise UsageError(what, where=str(path), do=ABSOLUTE)
    return Path(root).expanduser().absolute()


def install_root(environ: Mapping[str, str], start: Path) -> Path:
    """Return the path of the install root; see ``chosen_root``."""
    return chosen_root(environ, start).path


class NotWritable(EnvironmentProblem):
    """A file or folder cannot be written; its content may still be readable."""


def cannot_write(path: Path, error: OSError, do: str | None = None) -> NotWritable:
    advice = do or WRITE_ADVICE.get(error.errno or 0, "set LLMB_INSTALL to another folder")
    return NotWritable(f"llmb cannot write: {error.strerror}", where=str(error.filename or path), do=advice)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of a write to ``path`` into NotWritable."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def check_regular(path: Path) -> None:
    """Raise OSError for a device, a pipe or a folder."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it exists and is not a regular file")


def write_atomically(path: Path, content: str | bytes, *, errors: str = "strict") -> None:
    """Replace ``path`` atomically; a new file has permissions by the umask, a replaced file keeps its own.

    Raise OSError.
    """
    check_regular(path)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            if path.exists():
                os.fchmod(stream.fileno(), path.stat().st_mode & 0o777)
            stream.write(content.encode("utf-8", errors) if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces ``path`` at the end. Raise EnvironmentProblem if it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        check_regular(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        what, do = f"llmb cannot write: {error.strerror or error}", "write elsewhere, or remove the cause of this error"
        raise EnvironmentProblem(what, where=str(path), do=do) from error
    finally:
        with suppress(OSError):
            partial.unlink()


BEFORE = ".before"
"""The text inserted before the suffix of a file's name when a newer file replaces it."""


def write_newest(path: Path, text: str) -> None:
    """Write ``text`` to ``path``; keep an existing file as the only older version. Raise NotWritable or UsageError."""
    check_links(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(path.with_name(f"{path.stem}{BEFORE}{path.suffix}"))
        write_atomically(path, text)


def new_numbered(folder: Path, name: str, create: Callable[[Path], object]) -> Path:
    """Return the first of ``name``, ``name-2``, ... in ``folder`` for which ``create`` raises no FileExistsError."""
    check_links(folder)
    number = 1
    while True:
        path = folder / (name if number == 1 else f"{name}-{number}")
        try:
            create(path)
        except FileExistsError:
            number += 1
            continue
        return path


def link_latest(install: Path, folder: RunFolder) -> None:
    """Make ``latest`` in ``install`` a link to ``folder``, unless something else has that name; ignore write errors."""
    link = install / LATEST
    if os.path.lexists(link) and not link.is_symlink():
        return
    temporary = install / f".{LATEST}.{secrets.token_hex(4)}"
    try:
        temporary.symlink_to(os.path.relpath(folder.path, install), target_is_directory=True)
        temporary.replace(link)
    except OSError:  # such as another user's, in a folder where only its owner may replace it
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


class BrokenRecord(EnvironmentProblem, ValueError):
    """A file that llmb stored does not contain valid data, or is unreadable."""


def read_stored(path: Path, shape: type[Shape]) -> Shape:
    """Return a JSON file's content; raise BrokenRecord with the place if it is invalid, OSError if it is unreadable."""
    text = read_regular(path, MOST_JSON_BYTES)
    try:
        check_values(text)
        content: Shape = _adapter(shape).validate_json(text)  # type: ignore[arg-type]  # mypy: no hash of a type[T]
    except ValidationError as error:
        place, wrong = first_problem(error)
        if place == "schema_version":
            what = "its schema is not that of this llmb: a development version before 0.1 or a later version wrote it"
            raise BrokenRecord(what, where=str(path)) from error
        raise BrokenRecord(f"it is damaged: {place}{': ' if place else ''}{wrong}", where=str(path)) from error
    except ValueError as error:
        raise BrokenRecord(f"it is damaged: {error}", where=str(path)) from error
    return content


def read_or_missing(what: str, read: Callable[[], Content]) -> Content | Missing:
    """Return the result of ``read``, or Missing with the error."""
    try:
        return read()
    except UNREADABLE as error:
        return Missing(f"{what} cannot be read: {why_unreadable(error)}")


def why_unreadable(error: Exception) -> str:
    """Describe an error of ``UNREADABLE`` in a single line."""
    if isinstance(error, BrokenRecord):
        return f"{error.what} ({Path(error.where or '').name})"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"{type(error).__name__}: {printable(error)[:MOST_SHOWN]}"


@cache
def _adapter(shape: type[Any]) -> TypeAdapter[Any]:
    """Return a type's adapter, which takes long to create for a dataclass."""
    return TypeAdapter(shape)


TAIL_BYTES = 64 * 1024
ATTEMPT = "llmb: attempt "
"""The beginning of the line that separates a run's attempts in its log."""


def tail(path: Path) -> str:
    """Return the end of a log, at most ``TAIL_BYTES``, all from the latest attempt; empty if there is no log."""
    if not path.exists():
        return ""
    with open_regular(path) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
        return latest_attempt(stream.read().decode(errors="replace"))


def latest_attempt(log: str) -> str:
    """Return the part of a log that the run's latest attempt wrote."""
    began = log.rfind(f"\n{ATTEMPT}")
    return log if began < 0 else log[began + 1 :]
