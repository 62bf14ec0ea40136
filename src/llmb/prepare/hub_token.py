# SPDX-License-Identifier: Apache-2.0
"""Where the token for the Hugging Face hub is from, and a typed one for this process and what it starts.

A token is never written to a file here: 'hf auth login' does that for users who want it.
"""

import os
from typing import Literal

from llmb.errors import UsageError
from llmb.prepare.needed import check_installed

VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
TokenSource = Literal["environment", "token file"]


def token_source() -> TokenSource | None:
    """None without a token. Raises EnvironmentProblem if the library that reads the file is not installed."""
    if any(os.environ.get(name, "").strip() for name in VARIABLES):
        return "environment"
    check_installed("checking access", "huggingface_hub")
    from huggingface_hub import get_token

    return "token file" if get_token() else None


def use_token(text: str) -> None:
    """For this process and what it starts. Raises UsageError, which does not repeat it, for what is no token."""
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("what was typed is no token: it has spaces or other characters that no token has")
    os.environ["HF_TOKEN"] = token
