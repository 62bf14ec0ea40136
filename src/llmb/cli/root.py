# SPDX-License-Identifier: Apache-2.0
"""The root of installation, for every command."""

import os
from pathlib import Path

from llmb.cli.messages import say
from llmb.runs.folder import chosen_root


def install_here() -> Path:
    """Where this command keeps and finds everything, which is printed where it is not the default.

    Raises UsageError if the environment names two.
    """
    root = chosen_root(os.environ, Path.cwd())
    if root.chosen_by:
        say(f"root of installation: {root.path} ({root.chosen_by})")
    return root.path
