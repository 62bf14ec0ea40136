# SPDX-License-Identifier: Apache-2.0
"""Downloads from the Hugging Face hub: the only module that contacts it, and only to prepare data and weights.

The hub's library reads the token, from HF_TOKEN or the file that 'hf auth login' writes, repeats requests that the hub
limits, and keeps what was downloaded; a token is not handled here.
"""

import os
import shutil
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from llmb.errors import EnvironmentProblem, InfrastructureError, LlmbError, UsageError, UserInterrupt, check_installed
from llmb.prepare.tokenizer import FILES as TOKENIZER_FILES
from llmb.prepare.tokenizer import TOKENIZER
from llmb.prepared.folders import PreparedFolders
from llmb.processes.signals import Interrupted, SignalGate, signals_as_exceptions
from llmb.runs.folder import cannot_write

Say = Callable[[str], object]
OnBytes = Callable[[int, int], object]
"""Called with the bytes done and in all."""
Kind = Literal["model", "dataset"]
AccessState = Literal["granted", "not granted", "no token", "token rejected", "not found", "not checked"]
"""State of a repository for this user; ``not found`` also where it is not shown to them."""

MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors", "model.safetensors.index.json")
"""Files of a model: no pickles, and no copies of the weights in other formats in folders below."""
RATE_LIMITED, UNAUTHORIZED, FORBIDDEN = 429, 401, 403
ANSWER_S = 20.0
"""A hub that does not say in that time what it has, or who may read it, is not waited for."""
THREADS = 4
GB = 10**9
ELSEWHERE = "run it on a machine with a network, or give local files with --source or --tokenizer"
LOG_IN = "set HF_TOKEN, or run 'hf auth login', with a token of https://huggingface.co/settings/tokens"


class HubDataset(NamedTuple):
    """A dataset on the hub: its repository, and the files that hold its splits, all of them needed."""

    repository: str
    files: tuple[str, ...]


SQUAD = HubDataset("rajpurkar/squad", ("plain_text/train-*.parquet", "plain_text/validation-*.parquet"))
DATASETS = {"squad": SQUAD, "squad-tiny": SQUAD}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The hub gave no answer, or a negative one."""

    error: LlmbError
    unreachable: bool = False
    """Files of an earlier download may be used instead."""
    access: AccessState = "not checked"


def fetch_model(
    name: str, page: str | None, folders: PreparedFolders, on_bytes: OnBytes, say: Say, *, weights: bool = True
) -> Path:
    """The folder with configuration, tokenizer and ``weights`` of ``name``, such as ``meta-llama/Meta-Llama-3-70B``.

    ``page`` is where access is requested. Files that were downloaded before are kept. Raises UsageError for a model
    that is not on the hub, EnvironmentProblem if this machine or this user cannot get it, and InfrastructureError if
    the hub fails.
    """
    if page is None:
        do = "give a local folder: --source or --tokenizer; 'llmb prepare sample' makes small ones"
        raise UsageError(f"{name} is not on the Hugging Face hub", do=do)
    patterns, needed = (MODEL_FILES, ("config.json", "*.safetensors")) if weights else (TOKENIZER_FILES, (TOKENIZER,))
    return Hub(folders.hub, say, page=page).fetch(name, "model", patterns, needed, on_bytes)


def fetch_dataset(name: str, folders: PreparedFolders, on_bytes: OnBytes, say: Say) -> Path:
    """The folder with the files of a dataset of ``DATASETS``, named like their commit. Raises the same errors."""
    dataset = DATASETS[name]
    return Hub(folders.hub, say).fetch(dataset.repository, "dataset", dataset.files, dataset.files, on_bytes)


def access_refusal(name: str, kind: Kind, page: str, endpoint: str | None) -> Refusal | None:
    """Why this user may not read a repository, by one request; None if it may be read. ``endpoint`` as of ``Hub``."""
    check_installed("checking access", "huggingface_hub")
    from huggingface_hub import constants, utils

    library: Any = utils  # it does not declare what it exports
    url = f"{endpoint or constants.ENDPOINT}/api/{kind}s/{name}/auth-check"
    try:
        library.hf_raise_for_status(
            library.get_session().get(url, headers=library.build_hf_headers(), timeout=ANSWER_S)
        )
    except _failures() as error:
        return _explained(error, name, page)
    return None


@dataclass(frozen=True, slots=True)
class Hub:
    """The hub, and where its files are kept: in ``folder``, or where HF_HUB_CACHE or HF_HOME say."""

    folder: Path
    say: Say
    page: str | None = None
    """Where access to a repository is requested; None for its own page."""
    endpoint: str | None = None
    """None for that of the library: HF_ENDPOINT, or huggingface.co."""

    def cache(self, environ: Mapping[str, str]) -> Path:
        if environ.get("HF_HUB_CACHE"):
            return Path(environ["HF_HUB_CACHE"]).expanduser()
        if environ.get("HF_HOME"):
            return Path(environ["HF_HOME"]).expanduser() / "hub"
        return self.folder

    def fetch(self, name: str, kind: Kind, patterns: Sequence[str], needed: Sequence[str], on_bytes: OnBytes) -> Path:
        """A folder with the files of a repository that match ``patterns``; one at least matches each of ``needed``.

        Without a network, it is that of an earlier download. Raises as ``fetch_model``.
        """
        check_installed("downloading", "huggingface_hub")
        cache = self.cache(os.environ)
        try:
            sizes = self._sizes(name, kind, patterns)
            if missing := _missing(needed, sizes):
                what = f"{name} on the hub has no {' and no '.join(missing)}"
                raise UsageError(what, do="give local files with --source or --tokenizer")
            cache.mkdir(parents=True, exist_ok=True)
            return self._download(name, kind, cache, sizes, on_bytes)
        except _failures() as error:
            if _is_local(error):
                assert isinstance(error, OSError)
                raise cannot_write(cache, error) from error
            refusal = _explained(error, name, self.page or f"https://huggingface.co/{name}")
            earlier = _earlier(name, kind, cache, patterns, needed) if refusal.unreachable else None
            if earlier is None:
                raise refusal.error from error
            self.say(f"{refusal.error.what}: using {name} as it was downloaded before")
            return earlier

    def _sizes(self, name: str, kind: Kind, patterns: Sequence[str]) -> dict[str, int]:
        """The size of each file that matches."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint)
        info = (api.model_info if kind == "model" else api.dataset_info)(name, files_metadata=True, timeout=ANSWER_S)
        files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return {file: size for file, size in files.items() if _matches(file, patterns)}

    def _download(self, name: str, kind: Kind, cache: Path, sizes: Mapping[str, int], on_bytes: OnBytes) -> Path:
        from huggingface_hub import snapshot_download, try_to_load_from_cache

        cached = (try_to_load_from_cache(name, file, cache_dir=cache, repo_type=kind) for file in sizes)
        have = sum(size for size, path in zip(sizes.values(), cached, strict=True) if isinstance(path, str))
        total = sum(sizes.values())
        _check_disk(name, cache, total - have)
        with signals_as_exceptions() as signals:
            try:
                signals.let_through()
                path = snapshot_download(
                    name,
                    repo_type=kind,
                    cache_dir=cache,
                    endpoint=self.endpoint,
                    allow_patterns=list(sizes),
                    max_workers=THREADS,
                    tqdm_class=_bars(lambda done: on_bytes(min(have + done, total), total), signals),
                )
            except Interrupted as signal:
                do = "repeat the command: it downloads what is missing"
                raise UserInterrupt(f"interrupted by {signal}", do=do) from signal
        on_bytes(total, total)
        return Path(path)


def _bars(on_bytes: Callable[[int], object], signals: SignalGate) -> Any:  # noqa: ANN401 (the library's are untyped)
    """A class of progress bars that show nothing themselves; threads that download end when a signal has arrived."""
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
                    on_bytes(Bars.done)

    return Bars


def _earlier(name: str, kind: Kind, cache: Path, patterns: Sequence[str], needed: Sequence[str]) -> Path | None:
    """The folder of an earlier download, if it is complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(
            snapshot_download(
                name,
                repo_type=kind,
                cache_dir=cache,
                local_files_only=True,
                allow_patterns=list(patterns),
                ignore_patterns=None if any("/" in pattern for pattern in patterns) else "*/*",
            )
        )
    except LocalEntryNotFoundError:
        return None
    files = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    return None if _missing(needed, files) else path


def _matches(file: str, patterns: Sequence[str]) -> bool:
    """As a path: a star stands for no slash."""
    return any(file.count("/") == pattern.count("/") and fnmatch(file, pattern) for pattern in patterns)


def _missing(needed: Sequence[str], files: Collection[str]) -> list[str]:
    """The patterns that no file matches."""
    return [pattern for pattern in needed if not any(_matches(file, [pattern]) for file in files)]


def _check_disk(name: str, cache: Path, size: int) -> None:
    free = shutil.disk_usage(cache).free
    if size > free:
        what = f"downloading {name} needs {size / GB:.3g} GB, and the disk has {free / GB:.3g} GB free"
        raise EnvironmentProblem(what, where=str(cache), do="free some space, or set HF_HOME to another disk")


def _failures() -> tuple[type[Exception], ...]:
    """What the library raises where the hub refuses, fails or is not reached."""
    from huggingface_hub.errors import HfHubHTTPError

    # Its base is the class of all errors of the HTTP library, which is another one in other versions.
    return (HfHubHTTPError.__bases__[0], OSError, RuntimeError, UnicodeEncodeError)


def _explained(error: Exception, name: str, page: str) -> Refusal:
    """Explains an error that was raised while getting ``name``; ``page`` is where access to it is requested."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return Refusal(EnvironmentProblem("HF_HUB_OFFLINE is set", do=f"unset it, {ELSEWHERE}"), unreachable=True)
    if isinstance(error, UnicodeEncodeError):  # of the header with the token
        return Refusal(
            EnvironmentProblem("the token has characters that a token cannot have", do=LOG_IN), access="token rejected"
        )
    if isinstance(error, GatedRepoError):
        return _gated(name, page)
    status = _status(error)
    if isinstance(error, RepositoryNotFoundError):
        do = "check the name; if the repository is private, " + LOG_IN
        return Refusal(UsageError(f"the hub has no {name}, or does not show it to you", do=do), access="not found")
    if status in (UNAUTHORIZED, FORBIDDEN):
        what = f"the hub rejects the token that was sent for {name}"
        return Refusal(EnvironmentProblem(what, do=LOG_IN), access="token rejected")
    if status == RATE_LIMITED:
        do = "retry later; with a token the limit is higher: " + LOG_IN
        return Refusal(InfrastructureError("the hub limits the rate of requests", do=do))
    if status is not None:
        what = f"the hub answered {status} for {name}"
        return Refusal(InfrastructureError(what, do="retry later"), unreachable=status >= 500)
    what = f"the hub cannot be reached: {_first_line(error)}"
    return Refusal(EnvironmentProblem(what, do=ELSEWHERE), unreachable=True)


def _is_local(error: BaseException) -> bool:
    """Whether it is this machine's disk, not the network, that failed."""
    network = (ConnectionError, TimeoutError, socket.gaierror)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, network)


def _gated(name: str, page: str) -> Refusal:
    from huggingface_hub import get_token

    if get_token() is None:
        what, do = f"{name} is gated, and there is no token", f"request access at {page}, then {LOG_IN}"
        return Refusal(EnvironmentProblem(what, do=do), access="no token")
    what = f"{name} is gated, and the account of the token has no access"
    do = f"request access at {page}, with the account of the token, and wait until it is granted"
    return Refusal(EnvironmentProblem(what, do=do), access="not granted")


def _status(error: Exception) -> int | None:
    """What the hub answered; None without an answer."""
    responses = (getattr(one, "response", None) for one in (error, error.__cause__))
    return next((int(response.status_code) for response in responses if response is not None), None)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
