# SPDX-License-Identifier: Apache-2.0
"""What a run without a record computed, as far as its log and the name of its experiment tell."""

import re

from llmb.logs.files import ParsedFile
from llmb.runs.identity import RunIdentity

_AROUND_EXPERIMENT = re.compile(r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?|(?:_\d+)*\.out(?:\.gz)?$")
"""Of a log's name: the account, and the numbers of the job and of its start."""


def log_identity(file: ParsedFile) -> RunIdentity:
    """Equal for logs of repeats.

    The name counts as a whole if it does not tell what was trained: two runs are not taken for repeats because nothing
    is known of either.
    """
    outcome = file.outcome
    known = dict(outcome.configuration)
    if outcome.format:
        known["program"] = outcome.format
    if "workload" not in known:
        known["experiment"] = _AROUND_EXPERIMENT.sub("", file.path.name)
    return RunIdentity(configuration=known)
