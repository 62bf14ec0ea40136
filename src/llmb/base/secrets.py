# SPDX-License-Identifier: Apache-2.0
"""Detects secrets by their names and by the form of their values. Pure."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

# The expressions are compiled at their first use: every command imports this, and few need it.
# Part or end of the name: HF_TOKEN, OPENAI_API_KEY, SLURM_JWT, DBPWD, but not TOKENIZERS_PARALLELISM.
_BY_NAME = (
    r"(?i)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|CREDENTIAL|COOKIE|BEARER|APIKEY|ACCESSKEY|ACCOUNTKEY|PRIVATEKEY"
    r"|PGPASS|PWD|JWT|CONNECTION_?STRING|(^|_)(KEY|PAT|PASS|PSK|CREDS?|AUTH|AUTHORIZATION|NETRC|SAS|SIG|SIGNATURE|DSN))"
    r"(?P<many>S?)\d*(_|$)"
)
# Names that match the above, but hold no secret.
_NO_SECRET = frozenset({"PWD", "OLDPWD"})
# Location of a key or of an agent that holds it: the value gives access to the key.
_KEY_SOURCES = frozenset({"SSH_AUTH_SOCK", "SSH_ASKPASS"})
_BY_VALUE = (
    r"(?<![A-Za-z0-9])("
    # By the prefix that its issuer gives it; long enough not to match settings.
    r"(hf|api_org)_[A-Za-z0-9]{20,}|gl(pat|dt|rtr?|cbt|ptt|ft|imt|agent|wt|soat|ffct|oas)-[\w-]{16,}"
    r"|(gh[pousr]_|github_pat_|npm_|r8_|gsk_|xai-|pplx-|nvapi-|sk-|[sr]k_(live|test)_|dckr_pat_|pypi-|hv[sb]\.)[\w-]{20,}"
    r"|A[KS]IA[0-9A-Z]{16}|xox[abeprs]-[\w-]{8,}|xapp-[\w-]{16,}|AIza[\w-]{30,}"
    r"|ya29\.[\w-]{16,}|dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{32,}|wandb_v\d_\w{16,}|AGE-SECRET-KEY-\w+|SG\.[\w-]{16,80}\.[\w-]{16,}"
    # A JSON web token, in three parts.
    r"|eyJ[\w-]{8,400}\.[\w-]{8,}\.[\w-]*"
    r"|(?i:bearer)\s+[\w.~+/=-]{16,}|(?i:basic)\s+(?=[a-z]*[A-Z0-9+/])[A-Za-z0-9+/]{12,}={0,2}(?![\w-])"
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    # https://user:password@host, also without the user; https://token@host; as a path, with one slash.
    r"|(?:(?<=://)|(?<=:/)(?!/))([^\s/:@]*:[^\s/@]+|[^\s/:@]{20,})(?=@)"
)
# Each match of ``_BY_VALUE`` contains one of these. Looking for them takes a third of the time, and few lines have any.
_MARKS = (
    *("hf_", "api_org_", "glpat-", "gldt-", "glrt-", "glrtr-", "glcbt-", "glptt-", "glft-", "glimt-", "glagent-"),
    *("glwt-", "glsoat-", "glffct-", "gloas-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "npm_", "r8_"),
    *("gsk_", "xai-", "pplx-", "nvapi-", "sk-", "k_live_", "k_test_", "dckr_pat_", "pypi-", "hvs.", "hvb.", "AKIA"),
    *("ASIA", "xox", "xapp-", "AIza", "ya29.", "dapi", "dop_v1_", "wandb_v", "AGE-SECRET-KEY-", "SG.", "eyJ"),
    *("PRIVATE KEY-----", "@"),
)
_MARKS_IN_ANY_CASE = ("bearer", "basic")
# A setting in a text, such as ?token=... in an address or password=... of a database; not code such as key=$1.
_PAIR = r"""(?<![\w.])([A-Za-z][\w.-]{0,80}+)\s{0,3}+=\s{0,3}([^\s$"'(<{;&|,]{4})"""
# The same in a log, where names and values may be quoted, as in JSON, and a colon may be between them, as in headers.
_IN_LOG = (
    r"""(?<![\w.])([A-Za-z][\w.-]{0,80}+)\\?["']?\s{0,3}+([=:])\s{0,3}+(?:b?\\?["'])?"""
    r"""([^\s"'\\$(<{;&|,\[*][^\s"'\\;&|,]{0,200})"""
)
_OPTION = r"""(?<![\w-])--?([A-Za-z][\w.-]{0,80}+)\s{1,3}+["']?([^\s"'$(<{;&|,-][^\s"';&|,]{0,200})"""
_PARTS_OF_NAMES = (
    *("token", "secret", "pass", "cred", "cookie", "bearer", "key", "pwd", "jwt", "connection", "pat", "psk", "auth"),
    *("netrc", "sas", "sig", "dsn"),
)
"""Every secret's name contains one of these, which are found faster than the name."""
_WORDS = frozenset({"key", "pass", "pat", "sig", "sas", "auth"})
"""Names of secrets that also occur as words of a sentence before a colon."""
_LEAST = 4
"""Minimum length of a secret after one of ``_WORDS``."""
_COUNT = r"(?i)[-+]?\d[\d._]*(e[-+]?\d+)?[kmgtbs%]{0,2}(/\w{1,6})?"
_NO_VALUES = frozenset({"none", "null", "true", "false", "nan"})
_PLAIN = r"\d{1,9}(\.\d+)?"
_FUNCTION = "BASH_FUNC_"
HIDDEN = "[secret]"


def holds_secret(name: str, value: str = "") -> bool:
    """Return True if the name or value of a variable, option or argument suggests a secret."""
    return _is_secret_name(name, value) or has_secret(value, settings=not name.startswith(_FUNCTION))


def has_secret(text: str, *, settings: bool = True) -> bool:
    """Return True if a string may contain a secret; with ``settings``, check settings such as ``password=...`` too."""
    if _may_hold(text) and re.search(_BY_VALUE, text):
        return True
    return settings and "=" in text and any(_is_secret_name(name, value) for name, value in re.findall(_PAIR, text))


def has_secret_in_log(line: str) -> bool:
    """Return True if a log line may contain a secret."""
    if _may_hold(line) and re.search(_BY_VALUE, line):
        return True
    folded = line.casefold()
    if not any(part in folded for part in _PARTS_OF_NAMES):
        return False
    pairs = re.findall(_IN_LOG, line) if "=" in line or ":" in line else []
    options = re.findall(_OPTION, line) if "-" in line else []
    return any(_is_secret(name, value, mark) for name, mark, value in pairs) or any(
        _is_secret(name, value, " ") for name, value in options
    )


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not holds_secret(name, value)}


def redacted(text: str) -> str:
    """Return ``text`` with each secret that is recognizable without its name replaced by ``HIDDEN``."""
    return re.sub(_BY_VALUE, HIDDEN, text)


def secret_spans(text: str) -> list[tuple[int, int]]:
    """Return the start and end of each secret that ``redacted`` replaces."""
    return [match.span() for match in re.finditer(_BY_VALUE, text)]


def _may_hold(text: str) -> bool:
    if any(mark in text for mark in _MARKS):
        return True
    folded = text.casefold()
    return any(mark in folded for mark in _MARKS_IN_ANY_CASE)


def _is_secret_name(name: str, value: str) -> bool:
    match _secret_name(name):
        case "many":
            return not re.fullmatch(_PLAIN, value)
        case kind:
            return kind == "one"


def _is_secret(name: str, value: str, mark: str) -> bool:
    if _secret_name(name) is None or value.casefold() in _NO_VALUES:
        return False
    if name.casefold() in _WORDS:
        return mark == "=" and len(value) >= _LEAST
    return "token" not in name.casefold() or not re.fullmatch(_COUNT, value)


@lru_cache(maxsize=4096)
def _secret_name(name: str) -> Literal["one", "many"] | None:
    """Return ``many`` for a name of several secrets, ``one`` for a name of one, None for others."""
    plain = re.sub(r"[.-]", "_", name)
    if plain.upper() in _KEY_SOURCES:
        return "one"
    match = re.search(_BY_NAME, plain)
    if not match or plain.upper() in _NO_SECRET:
        return None
    return "many" if match["many"] else "one"
