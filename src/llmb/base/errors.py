# SPDX-License-Identifier: Apache-2.0
"""Errors that users can encounter, and parts of their texts. Scripts can rely on the exit codes."""

import difflib
import math
import re
import shlex
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmb.base.secrets import redacted
from llmb.base.shown_text import printable_lines

_BILLIONS = re.compile(r"\d+(\.\d+)?b")
SHORT = 5
MOST_ITEMS = 20
LIMITS = {
    "GPU type": "pass one of these; 'llmb predict', 'plan' and 'memory' accept other types with --hardware FILE",
    "workload": "llmb has no recipe for {}; see 'llmb docs what-llmb-does-not-do' and 'llmb docs add-a-model'",
    **dict.fromkeys(("yaml", "yml", "txt"), "to queue or start the runs that a file lists, use 'llmb bulk FILE'"),
    "json": "use --model-config FILE to show, predict, plan or run the model of a config.json",
}
"""Advice for unknown values, by the kind of value or, for names of files, by the extension."""


class LlmbError(Exception):
    """An error that the user can act on: the problem, its place, the valid values, and the advice."""

    exit_code = 2
    heading = "error"
    """The word that the command line prints before the message."""

    def __init__(
        self, what: str, *, where: str | None = None, choices: Iterable[object] = (), do: str | None = None
    ) -> None:
        self.what = redacted(what)
        self.where = where and redacted(where)
        self.choices = tuple(str(choice) for choice in choices)
        self.do = do and redacted(do)
        super().__init__(self.text())

    def text(self) -> str:
        parts = {"where:": self.where, "valid:": ", ".join(self.choices), "do:": self.do}
        lines = [f"  {name:6} {value}" for name, value in parts.items() if value]
        return printable_lines("\n".join((self.what, *lines)))

    def document(self) -> dict[str, Any]:
        """Return the error as a JSON document, with keys that programs can rely on."""
        return {
            "error": {
                "what": self.what,
                "where": self.where,
                "valid": list(self.choices),
                "do": self.do,
                "exit_code": self.exit_code,
            }
        }


class UsageError(LlmbError):
    """The request or one of its files is wrong (exit code 2)."""


class EnvironmentProblem(LlmbError):
    """This machine lacks something, or a file cannot be written or is damaged (exit code 3)."""

    exit_code = 3


class RunFailed(LlmbError):
    """A run, a check, a measurement or a program that llmb started failed (exit code 4)."""

    exit_code = 4


class Regressed(LlmbError):
    """Runs are slower than their reference by more than the tolerance (exit code 5)."""

    exit_code = 5
    heading = "verdict"


class InvalidRun(LlmbError):
    """The results of a run, or the files of a checkout, are invalid (exit code 6)."""

    exit_code = 6


class NoVerdict(LlmbError):
    """The measurements allow no conclusion, or are invalid (exit code 6)."""

    exit_code = 6
    heading = "verdict"


class InfrastructureError(LlmbError):
    """The cluster, its scheduler or the Hugging Face hub failed or did not respond (exit code 7)."""

    exit_code = 7


class UserInterrupt(LlmbError):
    """The command was interrupted or declined (exit code 130)."""

    exit_code = 130


def see(page: str, what: str = "") -> str:
    """Return advice to read a page of ``llmb docs``, followed by ``what``, such as ``for the format of files``."""
    return f"see 'llmb docs {page}'{what and ' '}{what}"


def itemized(items: Iterable[object]) -> str:
    """Return lines for an error message: one per item, up to ``MOST_ITEMS``, and the number of omitted items."""
    texts = list(items)
    more = [f"and {len(texts) - MOST_ITEMS} more"] if len(texts) > MOST_ITEMS else []
    return "".join(f"\n  - {item}" for item in (*texts[:MOST_ITEMS], *more))


def unknown(kind: str, value: object, choices: Iterable[object], *, do: str | None = None) -> UsageError:
    """Return an error for a value that is not one of ``choices``, which may suggest a similar one."""
    names = [str(choice) for choice in choices]
    model = str(value).lower().removeprefix("pretrain_").removeprefix("finetune_").partition("_")[0]
    meant = did_you_mean(value, names)
    if not meant and kind in LIMITS and not any(model in name for name in names):
        ending = str(value).rpartition(".")[2] if kind == "workload" else kind
        do = LIMITS.get(ending, LIMITS[kind]).format(model)
    return UsageError(f"unknown {kind} '{value}'{meant}", choices=names, do=do)


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """Return text that suggests the closest of ``names``, or an empty string if none is similar."""
    text, known = str(value).lower(), list(names)
    if _BILLIONS.fullmatch(text) and (sizes := [name for name in known if _BILLIONS.fullmatch(name)]):
        near = [min(sizes, key=lambda name: abs(math.log(float(name[:-1]) / (float(text[:-1]) or 1))))]
    else:
        near = closest(text, known, cutoff=0.5, most=1)
        alone = sum(text in name for name in known) == 1
        near = [name for name in near if name in text or (alone and text in name) or _wrong_letters(text, name) <= 2]
        if near and len(text) <= SHORT and text[-1:].isdigit() and sorted(near[0]) != sorted(text):
            near = closest(text, near, cutoff=0.8)
    return f"; did you mean '{near[0]}'?" if near else ""


def _wrong_letters(text: str, name: str) -> int:
    parts = difflib.SequenceMatcher(None, text, name.lower()).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in parts if tag != "equal")


def closest(value: str, names: Iterable[str], *, cutoff: float, most: int = 3) -> list[str]:
    """Return up to ``most`` names like ``value``, the closest first; ``cutoff`` is from 0 (anything) to 1 (equal)."""
    return difflib.get_close_matches(value, list(names), n=most, cutoff=cutoff)


def pip_install(*extras: str) -> str:
    """Return the command that installs llmb with ``extras`` for this Python, from llmb's checkout if there is one."""
    checkout, added = Path(__file__).parents[3], f"[{','.join(extras)}]"
    source = ("-e", f"{checkout}{added}") if (checkout / "pyproject.toml").is_file() else (f"llmb{added}",)
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(source)}"


def check_installed(what: str, *names: str, extra: str = "prepare") -> None:
    """Raise EnvironmentProblem if any of the packages ``names``, which are in ``extra``, is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        text = f"{what} needs {' and '.join(missing)}, which this Python does not have"
        raise EnvironmentProblem(text, do=pip_install(extra))
