# SPDX-License-Identifier: Apache-2.0
"""What an error of the hub's library means, and what to do about it."""

import re
import socket
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from llmb.errors import EnvironmentProblem, InfrastructureError, LlmbError, UsageError

RATE_LIMITED = 429
UNAUTHORIZED = 401
FORBIDDEN = 403
ELSEWHERE = "run it on a machine with a network, or give local files with --source or --tokenizer"
AccessState = Literal["granted", "not granted", "no token", "token rejected", "not found", "not checked"]
"""Of a repository for this user; ``not found`` also where it is not shown to them."""
LOG_IN = "set HF_TOKEN, or run 'hf auth login', with a token of https://huggingface.co/settings/tokens"


class Refusal(Exception):
    """The hub gave no answer, or a negative one.

    ``unreachable``: files of an earlier download may be used instead. ``passes``: a retry may have another outcome;
    ``broke``: only if there was a connection before. ``access``: what is known of the repository.
    """

    def __init__(
        self,
        error: LlmbError,
        *,
        unreachable: bool = False,
        passes: bool = False,
        broke: bool = False,
        access: AccessState = "not checked",
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.unreachable = unreachable
        self.passes = passes
        self.broke = broke
        self.access: AccessState = access


def explained(error: Exception, name: str, page: str) -> Refusal:
    """Of an error that was raised while getting ``name``; ``page`` is where access to it is requested."""
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
            EnvironmentProblem("the token has characters that no token has", do=LOG_IN), access="token rejected"
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
        return Refusal(InfrastructureError("the hub limits the rate of requests", do=do), passes=True)
    if status is not None:
        what = f"the hub answered {status} for {name}"
        return Refusal(InfrastructureError(what, do="retry later"), passes=status >= 500, unreachable=status >= 500)
    what = f"the hub cannot be reached: {_first_line(error)}"
    return Refusal(EnvironmentProblem(what, do=ELSEWHERE), unreachable=True, broke=True)


def retry_after_s(error: BaseException) -> float | None:
    """Seconds that the hub asks to wait; None if it does not say."""
    response = _response(error)
    if response is None:
        return None
    text = response.headers.get("Retry-After")
    if not text:
        limit = re.search(r"\br=0\b.*?\bt=(\d+)", response.headers.get("RateLimit", ""))  # as the hub itself says it
        return float(limit[1]) if limit else None
    if text.strip().isdecimal():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def is_local(error: BaseException) -> bool:
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
    response = _response(error)
    return None if response is None else int(response.status_code)


def _response(error: BaseException) -> Any:  # noqa: ANN401 (of one HTTP library or another)
    if getattr(error, "response", None) is None and error.__cause__ is not None:
        return getattr(error.__cause__, "response", None)
    return getattr(error, "response", None)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
