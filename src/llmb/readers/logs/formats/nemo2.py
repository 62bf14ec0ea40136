# SPDX-License-Identifier: Apache-2.0
"""NeMo 2 (2.0 to 2.5, ``nemo/lightning/pytorch/callbacks/progress_printer.py``), and ``llmb``'s own logs.

``Training epoch 0, iteration 49/49 | lr: 4.491e-06 | ... | train_step_timing in s: 12.39 | TFLOPS_per_GPU: 6.1e+02 |
consumed_samples: 6400``: fields in any order, most of them optional, four significant digits. With ``log_interval`` n,
every n-th step is logged and a value is the mean of n steps. Iterations may restart in each epoch; ``global_step``
does not, and is the step's number. The first version numbered iterations from 1, but ``global_step`` from 0.
"""

import re
import sys
from collections.abc import Iterator

from llmb.readers.logs.formats.format import NOT_FINITE, Format, find_bad_loss, has_any, rank_before
from llmb.readers.logs.step_line import LOAD_HEAD, STEP_LINE_HEAD, StepLine

MAX_BODY_BYTES = 4000
STEP_TIME, LOSS, TFLOPS = b"train_step_timing in s", b"reduced_train_loss", b"TFLOPS_per_GPU"
GBS, GLOBAL_STEP, SAMPLES = b"global_batch_size", b"global_step", b"consumed_samples"
_MEASURED = (STEP_TIME, LOSS, TFLOPS)
# Every repetition is bounded and the body possessive, so that text without line ends takes no quadratic time.
_HEAD = rb"Training epoch (\d{1,9}), iteration (\d{1,9})/(\d{1,9}) \|"
_LINE = re.compile(_HEAD + rb"([^\r\n]{0,%d}+)(?:[\r\n]|\Z)" % MAX_BODY_BYTES)
_FIELD = re.compile(rb" (%s): ([^ |\r\n]+)" % b"|".join((*_MEASURED, GBS, GLOBAL_STEP, SAMPLES)))
MOST_DIGITS = 15
"""Maximum number of digits in a number of steps or samples."""


class Nemo2Reader:
    """Reads step lines; drops lines that end in the middle of a value."""

    def __init__(self) -> None:
        self.before: tuple[bytes, bytes] = b"", b""
        """The two previous lines, without their beginnings."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        end = min(end, len(text))
        not_finite = has_any(text, NOT_FINITE, start, end)
        for match in _LINE.finditer(text, start, end):
            body = match[4]
            if STEP_LINE_HEAD in body:
                yield from filter(None, _split(match[0], ended=True))
                continue
            fields = _fields_of(body)
            if STEP_TIME not in fields:
                continue
            is_split = self.is_split(body)
            self.note(body)
            if not is_split and (step := _read(match, fields, rank_before(text, match.start(), start))):
                bad = find_bad_loss(match[0]) if not_finite else None
                yield step if bad is None else step._replace(loss=bad)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        steps = list(_split(text, ended=False))
        return [step for step in steps if step], bool(steps) and steps[-1] is None

    def is_split(self, body: bytes) -> bool:
        """Return whether a line may end within its last value: both previous lines have the same fields and more."""
        last = body.rpartition(b"|")[2].strip().partition(b":")[0]
        if last not in _MEASURED:
            return False
        names = _names(body)
        return all(len(names) < len(other) and other[: len(names)] == names for other in map(_names, self.before))

    def note(self, body: bytes) -> None:
        """Keep a line for comparison with the next one."""
        self.before = self.before[1], body


def _names(body: bytes) -> list[bytes]:
    return [field.partition(b":")[0].strip() for field in body.split(b"|")]


def _split(line: bytes, *, ended: bool) -> Iterator[StepLine | None]:
    """Yield each step in a line that holds several or lacks its newline; None for a truncated step."""
    parts = line.split(STEP_LINE_HEAD)[1:]
    for count, part in enumerate(parts, start=1):
        match = _LINE.fullmatch(STEP_LINE_HEAD + part)
        is_whole = ended and count == len(parts)
        step = _read(match, _fields_of(match[4]), None) if match and (is_whole or _is_complete(match[4])) else None
        yield step if step is None or is_whole else step._replace(samples=None)  # it may be truncated


def _is_complete(body: bytes) -> bool:
    """Return whether the values are complete although the newline is missing."""
    name, _, value = body.rpartition(b"|")[2].strip().partition(b": ")
    return b" %s: " % SAMPLES in body and value != b"" and name not in _MEASURED


def _fields_of(body: bytes) -> dict[bytes, bytes]:
    """Return the relevant values by name; if a name is repeated, its first value."""
    return dict(reversed(_FIELD.findall(body)))


def _read(match: "re.Match[bytes]", fields: dict[bytes, bytes], rank: int | None) -> StepLine | None:
    if STEP_TIME not in fields:
        return None
    epoch, iteration, declared = map(int, match.group(1, 2, 3))
    before = epoch * (declared + 1)  # if ``declared`` is an epoch's last iteration, and not the run's
    global_step = _integer(fields.get(GLOBAL_STEP))
    step = before + iteration if global_step is None else global_step
    counted_from_1 = step == iteration - 1
    last = declared + before if step == before + iteration else declared - counted_from_1
    loss, rate = fields.get(LOSS), fields.get(TFLOPS)
    try:
        return StepLine(
            step,
            max(last, step),
            float(fields[STEP_TIME]),
            None if loss is None else float(loss),
            None if rate is None else float(rate),
            rank=rank,
            gbs=_integer(fields.get(GBS)),
            samples=_integer(fields.get(SAMPLES)),
        )
    except ValueError:
        return None


def _integer(value: bytes | None) -> int | None:
    return int(value) if value and len(value) <= MOST_DIGITS and value.isdigit() else None


FORMAT = Format(
    name="nemo2",
    title="NeMo 2",
    marks=(STEP_LINE_HEAD, LOAD_HEAD),
    step=re.compile(
        _HEAD
        + rb"(?=[^\r\n]{0,%d}+(?:[\r\n]|\Z))[^\r\n]{0,%d}?" % (MAX_BODY_BYTES, MAX_BODY_BYTES)
        + rb" %s: " % STEP_TIME
    ),
    reader=Nemo2Reader,
    mean_of_interval=True,
    resumed=re.compile(LOAD_HEAD),
)
