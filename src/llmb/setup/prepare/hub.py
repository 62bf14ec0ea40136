# SPDX-License-Identifier: Apache-2.0
"""The only module that contacts the Hugging Face hub. llmb never stores a token that the user types."""

import os
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from llmb.base.errors import (
    EnvironmentProblem,
    InfrastructureError,
    LlmbError,
    UsageError,
    UserInterrupt,
    check_installed,
)
from llmb.base.processes import Interrupted, SignalGate, signals_as_exceptions
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import source_of
from llmb.runs.checkpoints.prepared_data import PreparedFolders
from llmb.runs.folder import cannot_write
from llmb.setup.prepare.tokenizer import FILES as TOKENIZER_FILES
from llmb.setup.prepare.tokenizer import TOKENIZER

OnBytes = Callable[[int, int], object]
"""A function that is called with the number of bytes done and the total."""
Kind = Literal["model", "dataset"]
AccessState = Literal["granted", "not granted", "no token", "token rejected", "not found", "not checked"]
"""The user's access to a repository; a repository that is hidden from the user is ``not found`` too."""

MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors", "model.safetensors.index.json")
"""Files of a model, without pickles and files in subfolders."""
RATE_LIMITED, UNAUTHORIZED, FORBIDDEN = 429, 401, 403
THREADS = 4
LOG_IN = "set HF_TOKEN, or run 'hf auth login', with a token from https://huggingface.co/settings/tokens"


class HubDataset(NamedTuple):
    """A dataset on the hub: its repository, and patterns of the files with its splits, each of which must match."""

    repository: str
    files: tuple[str, ...]


SQUAD = HubDataset("rajpurkar/squad", ("plain_text/train-*.parquet", "plain_text/validation-*.parquet"))
DATASETS = {"squad": SQUAD, "squad-tiny": SQUAD}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error to raise if the hub denies access, fails or does not respond."""

    error: LlmbError
    access: AccessState = "not checked"


def fetch_model(
    name: str, page: str | None, folders: PreparedFolders, on_bytes: OnBytes, *, weights: bool = True
) -> Path:
    """Download a model's tokenizer and, with ``weights``, its weights; return the folder.

    Raise UsageError, EnvironmentProblem, InfrastructureError or UserInterrupt.
    """
    if page is None:
        do = f"pass {'--source' if weights else '--tokenizer'} FOLDER; 'llmb prepare sample small' creates small/model"
        raise UsageError(f"{name} is not on the Hugging Face hub", do=do)
    patterns, needed = (MODEL_FILES, ("config.json", "*.safetensors")) if weights else (TOKENIZER_FILES, (TOKENIZER,))
    return Hub(folders.hub, page=page).fetch(name, "model", patterns, needed, on_bytes)


def fetch_dataset(name: str, folders: PreparedFolders, on_bytes: OnBytes) -> Path:
    """Download a dataset of ``DATASETS`` to a folder named after its commit; raise errors as ``fetch_model`` does."""
    dataset = DATASETS[name]
    return Hub(folders.hub).fetch(dataset.repository, "dataset", dataset.files, dataset.files, on_bytes)


def access_refusal(name: str, kind: Kind, page: str, endpoint: str | None) -> Refusal | None:
    """Return why this user cannot read a repository, else None.

    Raise EnvironmentProblem if the hub's library is not installed.
    """
    check_installed("checking access", "huggingface_hub")
    from huggingface_hub import HfApi

    try:
        HfApi(endpoint=endpoint).auth_check(name, repo_type=kind)
    except _failures() as error:
        return _explained(error, name, page)
    return None


def hub_cache(folder: Path) -> Path:
    """Return the folder for the hub's files: HF_HUB_CACHE, else ``hub`` in HF_HOME, else ``folder``."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    return Path(home).expanduser() / "hub" if home else folder


@dataclass(frozen=True, slots=True)
class Hub:
    """The hub, and the folder for its files unless the user's environment variables set another one."""

    folder: Path
    page: str | None = None
    """The page to request access to a repository; None for the repository's own page."""
    endpoint: str | None = None
    """None for the library's default: HF_ENDPOINT, or huggingface.co."""

    def fetch(self, name: str, kind: Kind, patterns: Sequence[str], needed: Sequence[str], on_bytes: OnBytes) -> Path:
        """Download files that match ``patterns``, one or more per ``needed``; return the folder.

        Raise as ``fetch_model`` does.
        """
        check_installed("downloading", "huggingface_hub")
        cache, local = hub_cache(self.folder), "--tokenizer" if needed == (TOKENIZER,) else "--source"
        try:
            path = self._download(name, kind, cache, patterns, on_bytes)
        except _failures() as error:
            if _is_local(error):
                assert isinstance(error, OSError)
                raise cannot_write(cache, error) from error
            raise _explained(error, name, self.page or f"https://huggingface.co/{name}", local).error from error
        files = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
        if missing := _missing(needed, files):
            what = f"{name} has no {' and no '.join(missing)} on the hub, or in the local cache"
            raise UsageError(what, where=str(path), do=f"retry with a network, or pass local files with {local}")
        return path

    def _download(self, name: str, kind: Kind, cache: Path, patterns: Sequence[str], on_bytes: OnBytes) -> Path:
        from huggingface_hub import snapshot_download

        with signals_as_exceptions() as signals:
            try:
                signals.let_through()
                path = snapshot_download(
                    name,
                    repo_type=kind,
                    cache_dir=cache,
                    endpoint=self.endpoint,
                    allow_patterns=list(patterns),
                    ignore_patterns=None if any("/" in pattern for pattern in patterns) else "*/*",
                    max_workers=THREADS,
                    tqdm_class=_bars(on_bytes, signals),
                )
            except Interrupted as signal:
                do = "repeat the command: it downloads what is missing"
                raise UserInterrupt(f"interrupted by {signal}", do=do) from signal
        return Path(path)


def _bars(on_bytes: OnBytes, signals: SignalGate) -> Any:  # noqa: ANN401 (the library's are untyped)
    from huggingface_hub.utils.tqdm import tqdm

    class Bars(tqdm):
        done, lock = 0, Lock()

        def __init__(self, *args: Any, **values: Any) -> None:  # noqa: ANN401 (those of tqdm)
            self.counts = values.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**values, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if signals.name:
                raise Interrupted(signals.name)
            if self.counts:
                with self.lock:
                    Bars.done += int(n or 0)
                    on_bytes(Bars.done, max(Bars.done, int(self.total or 0)))

    return Bars


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(file.count("/") == pattern.count("/") and fnmatch(file, pattern) for pattern in patterns)


def _missing(needed: Sequence[str], files: Collection[str]) -> list[str]:
    return [pattern for pattern in needed if not any(_matches(file, [pattern]) for file in files)]


def _failures() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError

    # Its base is the class of all errors of the HTTP library, which depends on the version.
    return (HfHubHTTPError.__bases__[0], OSError, RuntimeError, UnicodeEncodeError)


def _explained(error: Exception, name: str, page: str, local: str = "--source") -> Refusal:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        do = f"unset it, or pass local files with {local}"
        return Refusal(EnvironmentProblem("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set", do=do))
    if isinstance(error, UnicodeEncodeError):  # of the header with the token
        return Refusal(EnvironmentProblem("the token has invalid characters", do=LOG_IN), access="token rejected")
    if isinstance(error, GatedRepoError):
        return _gated(name, page)
    status = _status(error)
    if isinstance(error, RepositoryNotFoundError):
        do = "check the name; if the repository is private, " + LOG_IN
        return Refusal(UsageError(f"the hub has no {name}, or hides it from you", do=do), access="not found")
    if status in (UNAUTHORIZED, FORBIDDEN):
        what = f"the hub rejects the token that was sent for {name}"
        return Refusal(EnvironmentProblem(what, do=LOG_IN), access="token rejected")
    if status == RATE_LIMITED:
        do = "retry later; with a token the limit is higher: " + LOG_IN
        return Refusal(InfrastructureError("the hub limits the rate of requests", do=do))
    if status is not None:
        what = f"the hub answered {status} for {name}"
        return Refusal(InfrastructureError(what, do="retry later, or check HF_ENDPOINT if it is set"))
    what = f"the hub cannot be reached, or a download failed: {_first_line(error)}"
    do = f"repeat the command on a machine with a network, or pass local files with {local}"
    return Refusal(EnvironmentProblem(what, do=do))


def _is_local(error: BaseException) -> bool:
    """Return True if this machine's disk, not the network, caused the failure."""
    network = (ConnectionError, TimeoutError, socket.gaierror)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, network)


def _gated(name: str, page: str) -> Refusal:
    from huggingface_hub import get_token

    if get_token() is None:
        what, do = f"{name} is gated, but there is no token", f"request access at {page}, then {LOG_IN}"
        return Refusal(EnvironmentProblem(what, do=do), access="no token")
    what = f"{name} is gated, and the account of the token has no access"
    do = f"request access at {page}, with the account of the token, and wait until it is granted"
    return Refusal(EnvironmentProblem(what, do=do), access="not granted")


def _status(error: Exception) -> int | None:
    responses = (getattr(one, "response", None) for one in (error, error.__cause__))
    return next((int(response.status_code) for response in responses if response is not None), None)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


DATASET_PAGE = "https://huggingface.co/datasets/"
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
TokenSource = Literal["environment", "token file"]
NOT_REFUSED: tuple[AccessState, ...] = ("granted", "not checked")


@dataclass(frozen=True, slots=True)
class NeededRepository:
    """A repository on the hub; ``page`` is where access to it is requested."""

    name: str
    kind: Kind
    page: str
    needed_for: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RepositoryAccess:
    """The access to a repository; ``reason`` explains missing access, or a failed check."""

    repository: NeededRepository
    state: AccessState
    reason: str | None = None


def needed_repositories(
    catalogue: Catalogue, models: Iterable[tuple[str, str]], *, weights: bool = True, data: bool = True
) -> tuple[NeededRepository, ...]:
    """Return the repositories that workloads and sizes need.

    Raise UsageError for a workload that needs no preparation.
    """
    files: dict[tuple[str, Kind, str], list[str]] = {}
    for workload, size in models:
        source = source_of(catalogue, workload, size)
        if weights and source.page:
            files.setdefault((source.model, "model", source.page), []).append(f"weights of {workload} {size}")
        if data:
            name = DATASETS[source.dataset].repository
            files.setdefault((name, "dataset", DATASET_PAGE + name), []).append(f"data of {workload} {size}")
    return tuple(NeededRepository(*key, needed_for=tuple(uses)) for key, uses in files.items())


def can_check() -> bool:
    """Return True if this Python has the library that contacts the hub."""
    return find_spec("huggingface_hub") is not None


def check_access(repositories: Sequence[NeededRepository], endpoint: str | None = None) -> tuple[RepositoryAccess, ...]:
    """Check access to each repository with the user's token.

    Raise EnvironmentProblem if the hub's library is not installed.
    """
    access = []
    for repository in repositories:
        refusal = access_refusal(repository.name, repository.kind, repository.page, endpoint)
        state: AccessState = refusal.access if refusal else "granted"
        access.append(RepositoryAccess(repository, state, refusal.error.what if refusal else None))
    return tuple(access)


def refused(access: Iterable[RepositoryAccess]) -> tuple[RepositoryAccess, ...]:
    """Return the repositories that this user cannot read, except repositories that could not be checked."""
    return tuple(item for item in access if item.state not in NOT_REFUSED)


def lacks_token(access: Iterable[RepositoryAccess]) -> bool:
    """Return True if a token is missing, or the hub rejected it."""
    return any(item.state in ("no token", "token rejected") for item in access)


def access_problem(access: Sequence[RepositoryAccess]) -> EnvironmentProblem | None:
    """Return an error with the remedies for all refusals; None if there are none."""
    wanting = refused(access)
    if not wanting:
        return None
    first = wanting[0].reason
    what = f"{len(wanting)} of {len(access)} repositories cannot be read: {first}" if len(wanting) > 1 else str(first)
    gated = [item.repository.page for item in wanting if item.state in ("no token", "not granted")]
    steps = [f"request access at {page}, with the account of the token, and wait until it is granted" for page in gated]
    if lacks_token(wanting):
        steps.append(LOG_IN)
    if any(item.state == "not found" for item in wanting):
        steps.append("if a repository is private, use a token of an account that may read it")
    return EnvironmentProblem(what, do="; ".join(steps))


def token_source() -> TokenSource | None:
    """Return the source of the token, if any. Raise EnvironmentProblem if the library that reads it is missing."""
    if any(os.environ.get(name, "").strip() for name in VARIABLES):
        return "environment"
    check_installed("checking access", "huggingface_hub")
    from huggingface_hub import get_token

    return "token file" if get_token() else None


def use_token(text: str) -> None:
    """Set the token for this process and its children; raise UsageError, without the token, if it is invalid."""
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("the input is not a token: it is empty, or has spaces or other invalid characters")
    os.environ["HF_TOKEN"] = token
