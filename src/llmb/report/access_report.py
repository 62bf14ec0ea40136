# SPDX-License-Identifier: Apache-2.0
"""Access to repositories on the hub, as a table and a JSON document."""

from collections.abc import Sequence
from typing import Any

from llmb.prepare.hub_access import RepositoryAccess, TokenSource
from llmb.report.output import result_table
from llmb.report.table import Table


def access_document(found: Sequence[RepositoryAccess], token: TokenSource | None) -> dict[str, Any]:
    """The JSON of ``llmb prepare access``; its keys are a contract."""
    return {
        "token": token,
        "granted": all(item.state == "granted" for item in found),
        "repositories": [
            {
                "name": item.repository.name,
                "kind": item.repository.kind,
                "needed_for": list(item.repository.needed_for),
                "state": item.state,
                "page": item.repository.page,
                "reason": item.reason,
            }
            for item in found
        ],
    }


def access_table(found: Sequence[RepositoryAccess]) -> Table:
    table = result_table("Access to the Hugging Face hub", "repository", "for", "state", "page")
    for item in found:
        what = item.repository
        table.add_row(what.name, ", ".join(what.needed_for), item.state, what.page)
    return table
