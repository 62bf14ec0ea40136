# SPDX-License-Identifier: Apache-2.0
"""Finds the reason for a failure or a slowdown in the text of a log."""

import re
from typing import Literal, NamedTuple

from llmb.readers.logs.formats import FORMATS
from llmb.readers.logs.formats.format import has_any

_PREFIX = (
    rb"(?: {0,9}\d{1,7}: |[\w.-]{1,60}/\d{1,5} |\[(?:rank|default)\d{1,7}\]: ?"
    rb"|\d{4}-\d\d-\d\d[T ][\d:.,]{5,20}Z? ?){0,4}"
)
_ERROR = re.compile(
    rb"^" + _PREFIX + rb"(?!\S*ChildFailedError)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b[^\r\n]*)", re.MULTILINE
)
_ERROR_SIGNS = (b"Error", b"Exception", b"Interrupt")
_FAILURES = tuple(
    (signs, re.compile(pattern))
    for signs, pattern in (
        (
            (b"Watchdog caught", b"NCCL WARN "),
            rb"Watchdog caught collective operation timeout[^\r\n]*|NCCL WARN [^\r\n]*",
        ),
        ((b"what(): ",), rb"\bwhat\(\): {1,4}([^\r\n]*)"),  # an exception of C++
        ((b"slurmstepd: error: ",), rb"slurmstepd: error: [^\r\n]*"),
        ((b"Fatal Python error: ",), rb"Fatal Python error: [^\r\n]*"),
        ((b"srun: error: ",), rb"srun: error: [^\r\n]*"),
        ((b"Killed", b"oom-kill"), rb"[^\r\n]{0,100}\b(?:Killed|oom-kill)\b[^\r\n]*"),
        ((b"ut of memory",), rb"[^\r\n]{0,100}\b[Oo]ut of memory\b[^\r\n]*"),
        ((b"Traceback (most recent",), rb"Traceback \(most recent[^\r\n]*"),  # of an exception with another name
    )
)
"""Signs and a pattern for each kind of failure, causes first; a sign occurs wherever the pattern matches."""
_ENDED_BY_SLURM = re.compile(rb"slurmstepd: error: [^\r\n]{0,200} DUE TO [^\r\n]*")
"""Slurm's message when it ends a job, whose processes then raise exceptions."""
_TIME_LIMIT = re.compile(rb"slurmstepd: error: [^\r\n]{0,200} DUE TO TIME LIMIT")
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\x20-\x7e\xa0-\U0010ffff]+")
_LONGEST_QUOTE = 160
_STEP_MARKS = tuple(mark for one in FORMATS for mark in one.marks[: one.step_marks])


class Content(NamedTuple):
    is_log: bool
    """True if the file seems to come from training."""
    text: str


_CONTENTS = (
    (re.compile(rb"\0"), Content(False, "binary data, or text in another encoding")),
    (
        re.compile(rb"(?i)iteration|training|model|experiment"),
        Content(True, "a run that ended before its first step, or a program whose steps llmb cannot read"),
    ),
)
_OTHER = Content(False, "not a training log")


def describe_content(head: bytes, tail: bytes) -> Content:
    """Describe a file without a step line, from its beginning and its end."""
    begun = next((item for item in FORMATS if max(map(item.find_step_mark, (head, tail))) >= 0), None)
    if begun:
        return Content(True, f"lines like those of {begun.title}, but none with a step and its time")
    return next((content for sign, content in _CONTENTS if sign.search(head) or sign.search(tail)), _OTHER)


def last_error(tail: bytes) -> str:
    """Return the last exception after the last step line, else another failure there, else the last line, or ""."""
    text = _after_steps(tail)
    lines = [line for line in re.split(rb"[\r\n]", text) if line.strip()]
    return _error(text) or (_printable(lines[-1]) if lines else "")


def error_at_end(tail: bytes) -> str:
    """Return the error after the last step line of a completed run; an empty string if there is none."""
    return _error(_after_steps(tail))


def fault_at_end(tail: bytes) -> str:
    """Return the error as ``error_at_end`` does, but ignore the scheduler's time limit and its consequences."""
    text = _after_steps(tail)
    limit = _TIME_LIMIT.search(text) if b" DUE TO TIME LIMIT" in text else None
    return _error(text[: limit.start()] if limit else text)


def _after_steps(tail: bytes) -> bytes:
    step_line = -1
    for mark in _STEP_MARKS:  # occurrences before the last one found do not matter
        step_line = max(step_line, tail.rfind(mark, step_line + 1))
    return tail if step_line < 0 else tail[step_line:].partition(b"\n")[2]


def _error(text: bytes) -> str:
    ended = _ENDED_BY_SLURM.search(text) if b" DUE TO " in text else None
    before = text[: ended.start()] if ended else text
    if has_any(before, _ERROR_SIGNS) and (errors := _ERROR.findall(before)):
        return _printable(errors[-1])
    for signs, failure in _FAILURES:
        if has_any(text, signs) and (match := failure.search(text)):
            return _printable(match[match.re.groups])
    return ""


def _printable(line: bytes) -> str:
    return _UNPRINTABLE.sub(" ", line.decode("utf-8", "replace")).strip()[:_LONGEST_QUOTE]


Slowed = Literal["profiled", "traced"]

_SIGNS: tuple[tuple[Slowed, tuple[bytes, ...], "re.Pattern[bytes]", str], ...] = (
    (
        "profiled",
        (b"Capture range ", b"nsys-report"),
        re.compile(rb"Capture range (?:started|ended) in the application\.|Generating '[^'\r\n]{0,200}nsys-report"),
        "Nsight Systems was attached",
    ),
    ("traced", (b": opCount ",), re.compile(rb"NCCL INFO \w{1,30}: opCount "), "NCCL logged every collective"),
)
"""For each cause of a slowdown: strings (one occurs in every match), a pattern, and a description of the evidence."""


def find_recorder(head: bytes, tail: bytes) -> tuple[Slowed, str] | None:
    """Return "profiled" or "traced", with evidence, if a profiler or NCCL's trace slowed down the run; else None."""
    parts = (head,) if head.endswith(tail) else (head, tail)  # the head of a short log contains the tail
    for status, marks, sign, text in _SIGNS:
        for part in parts:
            if has_any(part, marks) and sign.search(part):
                return status, f"{text}, which slows a run down"
    return None
