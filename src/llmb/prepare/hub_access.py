# SPDX-License-Identifier: Apache-2.0
"""Whether this user may read the repositories that fine-tunings start from, before anything is downloaded or queued.

A token that is typed is never written to a file here: 'hf auth login' does that for users who want it.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from llmb.catalogue.load import Catalogue
from llmb.errors import EnvironmentProblem, UsageError, check_installed
from llmb.prepare.dataset import source_of
from llmb.prepare.hub import DATASETS, LOG_IN, AccessState, Kind, access_refusal

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
    """``reason`` says why it is not granted, or could not be checked."""

    repository: NeededRepository
    state: AccessState
    reason: str | None = None


def needed_repositories(
    catalogue: Catalogue, models: Iterable[tuple[str, str]], *, weights: bool = True, data: bool = True
) -> tuple[NeededRepository, ...]:
    """Repositories of workloads and sizes, each once; weights also stand for the tokenizer.

    Raises UsageError for a workload that starts from nothing prepared.
    """
    found: dict[tuple[str, Kind, str], list[str]] = {}
    for workload, size in models:
        source = source_of(catalogue, workload, size)
        if weights and source.page:
            found.setdefault((source.model, "model", source.page), []).append(f"weights of {workload} {size}")
        if data:
            name = DATASETS[source.dataset].repository
            found.setdefault((name, "dataset", DATASET_PAGE + name), []).append(f"data of {workload} {size}")
    return tuple(NeededRepository(*key, needed_for=tuple(uses)) for key, uses in found.items())


def can_check() -> bool:
    """Whether this Python has the library that contacts the hub."""
    return find_spec("huggingface_hub") is not None


def check_access(repositories: Sequence[NeededRepository], endpoint: str | None = None) -> tuple[RepositoryAccess, ...]:
    """One small request for each, with the token of HF_TOKEN or of 'hf auth login'; it waits and retries for nothing.

    Raises EnvironmentProblem if the library that contacts the hub is not installed.
    """
    found = []
    for repository in repositories:
        refusal = access_refusal(repository.name, repository.kind, repository.page, endpoint)
        state: AccessState = refusal.access if refusal else "granted"
        found.append(RepositoryAccess(repository, state, refusal.error.what if refusal else None))
    return tuple(found)


def refused(found: Iterable[RepositoryAccess]) -> tuple[RepositoryAccess, ...]:
    """Repositories that a preparation would fail at; a hub that does not answer now may answer later."""
    return tuple(item for item in found if item.state not in NOT_REFUSED)


def lacks_token(found: Iterable[RepositoryAccess]) -> bool:
    """Whether another token may help."""
    return any(item.state in ("no token", "token rejected") for item in found)


def access_problem(found: Sequence[RepositoryAccess]) -> EnvironmentProblem | None:
    """What to do about all that is refused; None if nothing is."""
    wanting = refused(found)
    if not wanting:
        return None
    first = wanting[0].reason
    what = f"{len(wanting)} of {len(found)} repositories cannot be read: {first}" if len(wanting) > 1 else str(first)
    gated = [item.repository.page for item in wanting if item.state in ("no token", "not granted")]
    steps = [f"request access at {page}, with the account of the token, and wait until it is granted" for page in gated]
    if lacks_token(wanting):
        steps.append(LOG_IN)
    if any(item.state == "not found" for item in wanting):
        steps.append("if a repository is private, use a token of an account that may read it")
    return EnvironmentProblem(what, do="; ".join(steps))


def token_source() -> TokenSource | None:
    """None without a token. Raises EnvironmentProblem if the library that reads the file is not installed."""
    if any(os.environ.get(name, "").strip() for name in VARIABLES):
        return "environment"
    check_installed("checking access", "huggingface_hub")
    from huggingface_hub import get_token

    return "token file" if get_token() else None


def use_token(text: str) -> None:
    """For this process and what it starts. Raises UsageError, which does not repeat it, for what is not a token."""
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("what was typed is not a token: it has spaces or other characters that a token cannot have")
    os.environ["HF_TOKEN"] = token
