# SPDX-License-Identifier: Apache-2.0
"""Whether this user may read the repositories that fine-tunings start from, before anything is downloaded or queued."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from llmb.catalogue.load import Catalogue
from llmb.errors import EnvironmentProblem
from llmb.prepare.dataset import source_of
from llmb.prepare.hub import DATASETS, Kind, access_refusal
from llmb.prepare.hub_errors import LOG_IN, AccessState

DATASET_PAGE = "https://huggingface.co/datasets/"
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
    """Those of workloads and sizes, each once; weights also stand for the tokenizer.

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
    """Those that a preparation would fail at; a hub that does not answer now may answer later."""
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
