# SPDX-License-Identifier: Apache-2.0
"""Messages on standard error, where no result is printed."""

import sys


def say(text: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"llmb: {text}\n")
