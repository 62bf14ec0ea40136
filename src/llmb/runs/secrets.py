# SPDX-License-Identifier: Apache-2.0
"""Detects variables that hold secrets, by name and value: the only filter for files, scripts and jobs. Pure."""

import re
from collections.abc import Mapping

# Part or end of the name: HF_TOKEN, OPENAI_API_KEY, SLURM_JWT, MYPASSWORD, but not TOKENIZERS_PARALLELISM.
_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|CREDENTIAL|COOKIE|BEARER|APIKEY|ACCESSKEY|PRIVATEKEY|PGPASS"
    r"|(^|_)(KEY|JWT|PAT|PWD|PASS|AUTH|AUTHORIZATION|NETRC))S?(_|$)",
    re.IGNORECASE,
)
# Names that match the above, but hold no secret.
_NO_SECRET = frozenset({"PWD", "OLDPWD"})
# Location of a key or of an agent that holds it: the value gives access to the key.
_KEY_SOURCES = frozenset({"SSH_AUTH_SOCK", "SSH_ASKPASS"})
_SECRET_VALUE = re.compile(
    # Hugging Face, GitHub, GitLab, AWS, Slack, NVIDIA, OpenAI and Anthropic; long enough not to match settings.
    r"\b(hf_\w{20}|gh[pousr]_\w{20}|github_pat_\w{20}|glpat-[\w-]{16}|A[KS]IA[0-9A-Z]{16}|xox[abeprs]-[\w-]{8}"
    r"|nvapi-[\w-]{20}|sk-[\w-]{20}"
    # A JSON web token, in three parts.
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|\b(?i:bearer|basic)\s+[\w.~+/=-]{16}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    # https://user:password@host, also without the user.
    r"|\b[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*:[^\s/@]+@"
)


def holds_secret(name: str, value: str = "") -> bool:
    """True if a variable may hold a secret, which must not be saved or printed."""
    named = _SECRET_NAME.search(name) and name.upper() not in _NO_SECRET
    return bool(named or name.upper() in _KEY_SOURCES or _SECRET_VALUE.search(value))


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not holds_secret(name, value)}
