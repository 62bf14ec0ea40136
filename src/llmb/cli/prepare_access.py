# SPDX-License-Identifier: Apache-2.0
"""``llmb prepare access``, and the question for a token."""

import sys
from collections.abc import Sequence
from getpass import getpass
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import model_of, split_model
from llmb.catalogue.resolve import find_workload, sizes_of
from llmb.cli.common import Json
from llmb.cli.completion import workloads
from llmb.cli.root import can_ask, say
from llmb.prepare.hub_access import (
    NeededRepository,
    RepositoryAccess,
    access_problem,
    check_access,
    lacks_token,
    needed_repositories,
    token_source,
    use_token,
)
from llmb.report.output import print_output
from llmb.report.prepared_report import access_document, access_table

Workload = Annotated[
    str, typer.Option("-w", "--workload", help="Fine-tuning workload; see 'llmb list'.", autocompletion=workloads)
]
Size = Annotated[
    str | None, typer.Option("-s", "--size", help="Model size, such as 70b, if the workload's name has none.")
]

TINY = "tiny"
QUESTION = "Hugging Face token (it is not shown and not stored; Enter for none): "
STORED = "the token is used by this command alone; 'hf auth login' stores one for all"


def access(workload: Workload, size: Size = None, json: Json = False) -> None:
    """Check access to the repositories that a fine-tuning downloads from, before anything is downloaded or queued.

    The token is that of HF_TOKEN or of 'hf auth login'. Without one, a terminal is asked for it; it is then kept for
    this command alone. The exit code is 3 if a repository cannot be read; the error names the page to request access
    at. A hub that cannot be reached is a warning.

    Examples:

    - `llmb prepare access -w finetune_llama3`

    - `llmb prepare access -w finetune_llama3 -s 70b --json`
    """
    catalogue = Catalogue()
    found = checked_access(needed_repositories(catalogue, _models(catalogue, workload, size)))
    source = token_source()
    print_output(access_document(found, source) if json else access_table(found))
    for reason in dict.fromkeys(item.reason for item in found if item.state == "not checked"):
        say(f"warning: access is not checked: {reason}")
    if problem := access_problem(found):
        raise problem


def _models(catalogue: Catalogue, name: str, size: str | None) -> list[tuple[str, str]]:
    """All sizes but the tiny one where none is given."""
    workload, own_size = split_model(catalogue, name)
    if size or own_size:
        return [model_of(catalogue, name, size)]
    found = find_workload(catalogue, workload)
    return [(workload, size) for size in found.sources if size != TINY] or [(workload, sizes_of(found)[0])]


def checked_access(repositories: Sequence[NeededRepository]) -> Sequence[RepositoryAccess]:
    """Asks a terminal for a token where the one that is there does not do, and checks once more."""
    found = check_access(repositories)
    problem = access_problem(found)
    if problem is None or not lacks_token(found) or not can_ask():
        return found
    say(problem.what)
    sys.stderr.flush()
    token = _typed_token()
    if not token:
        return found
    use_token(token)
    say(STORED)
    return check_access(repositories)


def _typed_token() -> str:
    try:
        return getpass(QUESTION).strip()
    except EOFError:
        return ""
