# SPDX-License-Identifier: Apache-2.0
"""What ``--exclude`` stands for."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmb.cli.root import say
from llmb.health.exclusion import OPTION, excluded_nodes
from llmb.runs.folder import chosen_root


def with_excluded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options, with the nodes that ``--exclude`` stands for. Raises UsageError."""
    text = values.get(OPTION)
    return {**values, OPTION: excluded_here(text)} if text else {**values}


def excluded_here(text: str) -> str:
    """Raises UsageError."""
    return excluded_nodes(text, chosen_root(os.environ, Path.cwd()).path, say)
