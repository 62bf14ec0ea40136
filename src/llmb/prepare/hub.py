# SPDX-License-Identifier: Apache-2.0
"""Downloads from the Hugging Face hub: the only module that contacts it, and only to prepare data and weights.

The library reads the token, from HF_TOKEN or the file that 'hf auth login' writes; it is not handled here.
"""

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from llmb.errors import EnvironmentProblem, UsageError
from llmb.prepare.hub_errors import Refusal, explained, is_local, retry_after_s
from llmb.prepare.needed import check_installed
from llmb.prepare.tokenizer import FILES as TOKENIZER_FILES
from llmb.prepare.tokenizer import TOKENIZER
from llmb.prepared.folders import PreparedFolders
from llmb.runs.folder import cannot_write

Say = Callable[[str], object]
OnBytes = Callable[[int, int], object]
"""Called with the bytes done and in all."""
Kind = Literal["model", "dataset"]
T = TypeVar("T")

MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors", "model.safetensors.index.json")
"""Of a model: no pickles, and no copies of the weights in other formats in folders below."""
CACHE_VARIABLES = ("HF_HUB_CACHE", "HF_HOME")
TRIES = 6
LONGEST_WAIT_S = 300.0
"""A hub that asks for more than that is not waited for."""
ANSWER_S = 20.0
"""A hub that does not say in that time who may read what is not waited for."""
THREADS = 4
POLL_S = 0.5
ABANDONED_S = 3600.0
GB = 10**9


class HubDataset(NamedTuple):
    """A dataset on the hub: its repository, and the files that hold its splits, all of them needed."""

    repository: str
    files: tuple[str, ...]


SQUAD = HubDataset("rajpurkar/squad", ("plain_text/train-*.parquet", "plain_text/validation-*.parquet"))
DATASETS = {"squad": SQUAD, "squad-tiny": SQUAD}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Downloaded files in their folder; ``revision`` is the commit."""

    path: Path
    revision: str


def fetch_model(name: str, page: str | None, folders: PreparedFolders, on_bytes: OnBytes, say: Say) -> Path:
    """The folder with weights, configuration and tokenizer of ``name``, such as ``meta-llama/Meta-Llama-3-70B``.

    ``page`` is where access is requested. Files that were downloaded before are kept. Raises UsageError for a model
    that is not on the hub, EnvironmentProblem if this machine or this user cannot get it, and InfrastructureError if
    the hub fails.
    """
    hub = Hub(folders.hub, say, page=_page(name, page))
    return hub.fetch(name, "model", MODEL_FILES, ("config.json", "*.safetensors"), on_bytes).path


def fetch_tokenizer(name: str, page: str | None, folders: PreparedFolders, on_bytes: OnBytes, say: Say) -> Path:
    """The same without weights: the folder that holds ``tokenizer.json``."""
    hub = Hub(folders.hub, say, page=_page(name, page))
    return hub.fetch(name, "model", TOKENIZER_FILES, (TOKENIZER,), on_bytes).path


def fetch_dataset(name: str, folders: PreparedFolders, on_bytes: OnBytes, say: Say) -> Snapshot:
    """The files of a dataset of ``DATASETS``. Raises the same errors."""
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
        return explained(error, name, page)
    return None


def _failures() -> tuple[type[Exception], ...]:
    """What the library raises where the hub refuses, fails or is not reached."""
    from huggingface_hub.errors import HfHubHTTPError

    # Its base is the class of all errors of the HTTP library, which is another one in other versions.
    return (HfHubHTTPError.__bases__[0], OSError, RuntimeError, UnicodeEncodeError)


def _page(name: str, page: str | None) -> str:
    if page is None:
        do = "give a local folder: --source or --tokenizer; 'llmb prepare sample' makes small ones"
        raise UsageError(f"{name} is not on the Hugging Face hub", do=do)
    return page


@dataclass(frozen=True, slots=True)
class Hub:
    """The hub, and where its files are kept: in ``folder``, or where HF_HUB_CACHE or HF_HOME say."""

    folder: Path
    say: Say
    page: str | None = None
    """Where access to a repository is requested; None for its own page."""
    endpoint: str | None = None
    """None for that of the library: HF_ENDPOINT, or huggingface.co."""
    pause: Callable[[float], object] = time.sleep

    def cache(self, environ: Mapping[str, str]) -> Path:
        if environ.get("HF_HUB_CACHE"):
            return Path(environ["HF_HUB_CACHE"]).expanduser()
        if environ.get("HF_HOME"):
            return Path(environ["HF_HOME"]).expanduser() / "hub"
        return self.folder

    def fetch(
        self, name: str, kind: Kind, patterns: Sequence[str], needed: Sequence[str], on_bytes: OnBytes
    ) -> Snapshot:
        """The files of a repository that match ``patterns``; one at least has to match each of ``needed``.

        Without a network, those of an earlier download. Raises as ``fetch_model``.
        """
        check_installed("downloading", "huggingface_hub")
        cache = self.cache(os.environ)
        with _without_bars():
            try:
                revision, sizes = self._retried(name, lambda: self._listing(name, kind, patterns))
            except Refusal as refusal:
                return self._cached(name, kind, cache, needed, refusal)
            _check_needed(name, needed, sizes)
            try:
                cache.mkdir(parents=True, exist_ok=True)
                path = self._download(name, kind, cache, revision, sizes, on_bytes)
            except Refusal as refusal:
                raise refusal.error from refusal
            except OSError as error:
                raise cannot_write(cache, error) from error
        return Snapshot(path, revision)

    def _listing(self, name: str, kind: Kind, patterns: Sequence[str]) -> tuple[str, dict[str, int]]:
        """The commit, and the size of each file that matches."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint)
        info = (api.model_info if kind == "model" else api.dataset_info)(name, files_metadata=True)
        files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return str(info.sha), {file: size for file, size in files.items() if _matches(file, patterns)}

    def _cached(self, name: str, kind: Kind, cache: Path, needed: Sequence[str], refusal: Refusal) -> Snapshot:
        """The newest earlier download, if the hub cannot be reached. Raises the refusal's error otherwise."""
        from huggingface_hub.file_download import repo_folder_name

        folder = cache / repo_folder_name(repo_id=name, repo_type=kind) / "snapshots"
        for path in sorted(folder.glob("*"), key=lambda found: found.stat().st_mtime, reverse=True):
            files = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
            if refusal.unreachable and not _missing(needed, files):
                self.say(f"{refusal.error.what}: using {name} as it was downloaded before")
                return Snapshot(path, path.name)
        raise refusal.error from refusal

    def _download(
        self, name: str, kind: Kind, cache: Path, revision: str, sizes: Mapping[str, int], on_bytes: OnBytes
    ) -> Path:
        """Several files at a time; those that are there already take no time."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        def is_there(file: str) -> bool:
            found = try_to_load_from_cache(name, file, cache_dir=cache, revision=revision, repo_type=kind)
            return isinstance(found, str)

        def get(file: str) -> str:
            return str(
                hf_hub_download(name, file, repo_type=kind, revision=revision, cache_dir=cache, endpoint=self.endpoint)
            )

        _remove_leftovers(cache)
        missing = {file: size for file, size in sizes.items() if not is_there(file)}
        _check_disk(name, cache, sum(missing.values()))
        have, total = sum(sizes.values()) - sum(missing.values()), sum(sizes.values())
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="hub")
        try:
            futures = {
                pool.submit(self._retried, name, partial(get, file), reconnects=True): size
                for file, size in missing.items()
            }
            _follow(futures, cache, lambda done: on_bytes(min(have + done, total), total))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interrupted command ends at once
        file = next(iter(sizes))
        return Path(get(file)).parents[file.count("/")]

    def _retried(self, name: str, action: Callable[[], T], *, reconnects: bool = False) -> T:
        """Tries again while the hub limits requests or fails, longer apart each time; with ``reconnects`` also after
        a broken connection. Raises Refusal, or OSError for what this machine's disk refuses.
        """
        for attempt in range(1, TRIES + 1):
            try:
                return action()
            except _failures() as error:
                if is_local(error):
                    raise
                refusal = explained(error, name, self.page or f"https://huggingface.co/{name}")
                asked = retry_after_s(error)
                pause = min(2.0**attempt, LONGEST_WAIT_S) if asked is None else asked
                may_pass = refusal.passes or (reconnects and refusal.broke)
                if not may_pass or attempt == TRIES or pause > LONGEST_WAIT_S:
                    raise refusal from error
                self.say(f"{refusal.error.what}; retrying in {pause:.0f} s ({attempt} of {TRIES - 1})")
                self.pause(pause)
        raise AssertionError


def _follow(futures: Mapping["Future[str]", int], cache: Path, on_done: Callable[[int], object]) -> None:
    """Reports the bytes of complete files and of parts until all are done. Raises the first error."""
    waiting, began = set(futures), time.time()
    while waiting:
        finished, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_EXCEPTION)
        for future in finished:
            future.result()
        complete = sum(size for future, size in futures.items() if future not in waiting)
        on_done(complete + (sum(_sizes(cache.glob("*/blobs/*.incomplete"), began)) if waiting else 0))


def _remove_leftovers(cache: Path) -> None:
    """Parts of files that no process writes to any more: a killed one left them, and no other can use them."""
    for part in cache.glob("*/blobs/*.????????.incomplete"):
        with suppress(FileNotFoundError):  # it is complete by now
            if part.stat().st_mtime < time.time() - ABANDONED_S:
                part.unlink()


def _sizes(files: Iterator[Path], since: float) -> Iterator[int]:
    """Of the files that were written to ``since``: others are leftovers."""
    for file in files:
        try:
            found = file.stat()
        except FileNotFoundError:
            continue  # it was renamed, complete
        if found.st_mtime >= since:
            yield found.st_size


def _matches(file: str, patterns: Sequence[str]) -> bool:
    """As a path: a star stands for no slash."""
    return any(file.count("/") == pattern.count("/") and fnmatch(file, pattern) for pattern in patterns)


def _missing(needed: Sequence[str], files: Collection[str]) -> list[str]:
    """The patterns that no file matches."""
    return [pattern for pattern in needed if not any(_matches(file, [pattern]) for file in files)]


def _check_needed(name: str, needed: Sequence[str], files: Collection[str]) -> None:
    if missing := _missing(needed, files):
        what = f"{name} on the hub has no {' and no '.join(missing)}"
        raise UsageError(what, do="give local files with --source or --tokenizer")


def _check_disk(name: str, cache: Path, size: int) -> None:
    free = shutil.disk_usage(cache).free
    if size > free:
        what = f"downloading {name} needs {size / GB:.3g} GB, and the disk has {free / GB:.3g} GB free"
        raise EnvironmentProblem(what, where=str(cache), do="free some space, or set HF_HOME to another disk")


@contextmanager
def _without_bars() -> Iterator[None]:
    """The library's own bars would be between those of the command; its warnings about retries are shown."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    showed = not are_progress_bars_disabled()
    if showed:
        disable_progress_bars()
    try:
        yield
    finally:
        if showed:
            enable_progress_bars()
