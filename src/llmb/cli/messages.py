# SPDX-License-Identifier: Apache-2.0
"""Talk beside the result."""

import sys


def say(text: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"llmb: {text}\n")
