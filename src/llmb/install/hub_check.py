# SPDX-License-Identifier: Apache-2.0
"""Whether what an installation prepares can be downloaded, before it is."""

from collections.abc import Sequence

from llmb.catalogue.load import Catalogue
from llmb.install.answers import Answers
from llmb.install.prepared_sizes import prepared_sizes
from llmb.prepare.hub_access import NeededRepository, access_problem, can_check, check_access, needed_repositories

PREPARED_HOW = ("here", "job")


def hub_repositories(catalogue: Catalogue, answers: Answers) -> tuple[NeededRepository, ...]:
    """Those that the preparations download from; none where nothing is prepared or all is local."""
    if answers.prepare not in PREPARED_HOW:
        return ()
    models = list(prepared_sizes(catalogue, answers))
    return needed_repositories(
        catalogue, models, weights=not answers.checkpoint_source, data=not answers.dataset_source
    )


def check_hub(repositories: Sequence[NeededRepository]) -> str:
    """What was found, in words. Raises EnvironmentProblem for a repository that cannot be read."""
    if not can_check():
        return "not checked: this needs pip install 'llmb[prepare]' beside the command that installs"
    found = check_access(repositories)
    if problem := access_problem(found):
        raise problem
    reason = next((item.reason for item in found if item.state == "not checked"), None)
    return f"not checked: {reason}" if reason else f"granted: {', '.join(item.name for item in repositories)}"
