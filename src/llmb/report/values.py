# SPDX-License-Identifier: Apache-2.0
"""Values of a configuration as cells of a table; JSON documents have all of them."""

import re

from llmb.runs.identity import Value, value_text
from llmb.shown_text import printable

LONGEST_VALUE = 60
"""Lists of nodes and GPUs can be long."""
_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


def shortened(value: Value) -> str:
    """Commits by as many digits as git shows."""
    text = _COMMIT.sub(r"\1", printable(value_text(value)))
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
