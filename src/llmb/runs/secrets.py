# SPDX-License-Identifier: Apache-2.0
"""Which variables hold secrets, by their names and values. Pure."""

import re
from collections.abc import Mapping

# A part of the name, or its end: HF_TOKEN, OPENAI_API_KEY, MYPASSWORD, but not TOKENIZERS_PARALLELISM.
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)KEY)S?(_|$)", re.IGNORECASE)
# Hugging Face, GitHub, GitLab, AWS, Slack; long enough that no setting looks like it.
_SECRET_VALUE = re.compile(
    r"\b(hf_\w{20}|gh[pousr]_\w{20}|github_pat_\w{20}|glpat-[\w-]{16}|AKIA[0-9A-Z]{16}|xox[bp]-\w{8})"
)


def holds_secret(name: str, value: str = "") -> bool:
    """Whether a variable looks like one that must not be written anywhere."""
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not holds_secret(name, value)}
