# SPDX-License-Identifier: Apache-2.0
"""NeMo 2 (2.0 to 2.5, ``nemo/lightning/pytorch/callbacks/progress_printer.py``), and ``llmb``'s own logs.

``Training epoch 0, iteration 49/49 | lr: 4.491e-06 | ... | train_step_timing in s: 12.39 | TFLOPS_per_GPU: 6.1e+02 |
consumed_samples: 6400``: fields in any order, most of them optional, four significant digits. With ``log_interval`` n,
every n-th step is logged and a value is the mean of n steps. Iterations may restart in each epoch; ``global_step`` goes
on, and is the number of the step. The first version numbered iterations from 1, but ``global_step`` from 0.
"""

import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from llmb.logs.formats.format import (
    MAX_LINE_BYTES,
    NOT_FINITE,
    Format,
    find_bad_loss,
    has,
    has_any,
    rank_before,
)
from llmb.logs.step_line import LOAD_HEAD, STEP_LINE_HEAD, StepLine

MAX_BODY_BYTES = 4000
STEP_TIME_FIELD = b" train_step_timing in s: "
LOSS_FIELD = b" reduced_train_loss: "
TFLOPS_FIELD = b" TFLOPS_per_GPU: "
GLOBAL_STEP_FIELD = b" global_step: "
GBS_FIELD = b" global_batch_size: "
SAMPLES_FIELD = b" consumed_samples: "
_NAMES_READ = tuple(field.strip(b": ") for field in (STEP_TIME_FIELD, LOSS_FIELD, TFLOPS_FIELD))
# Every repetition is bounded and the body possessive, so that text without line ends takes no quadratic time.
_HEAD = rb"Training epoch (\d{1,9}), iteration (\d{1,9})/(\d{1,9}) \|"
_LINE = re.compile(_HEAD + rb"([^\r\n]{0,%d}+)(?:[\r\n]|\Z)" % MAX_BODY_BYTES)
_VALUE = rb"([^ |\r\n]+)"
_STEP_TIME = re.compile(STEP_TIME_FIELD + _VALUE)
_LOSS = re.compile(LOSS_FIELD + _VALUE)
_TFLOPS = re.compile(TFLOPS_FIELD + _VALUE)
_GLOBAL_STEP, _GBS, SAMPLES = (
    re.compile(field + rb"(\d{1,15})(?=[ |\r\n]|\Z)") for field in (GLOBAL_STEP_FIELD, GBS_FIELD, SAMPLES_FIELD)
)


# The usual line, whose fields are in this order: read by one pattern in half of the time. It ends with a field that no
# figure is made of, so that it cannot have been cut in one that is.
_FIELDS = rb"(?:[^|\r\n]{0,100}+\|){0,9}?"
_USUAL_LINE = (
    _HEAD + _FIELDS + rb"(?:" + GBS_FIELD + rb"(\d{1,15}) \|)?" + GLOBAL_STEP_FIELD + rb"(\d{1,9}) \|" + _FIELDS
    + LOSS_FIELD + _VALUE + rb" \|" + STEP_TIME_FIELD + _VALUE + rb"(?: \|" + TFLOPS_FIELD + _VALUE + rb")? \|"
    + SAMPLES_FIELD + rb"(\d{1,15})"
)  # fmt: skip
_USUAL = re.compile(_USUAL_LINE + rb"[\r\n]")
_FINITE = rb"(\d{1,12}+(?:\.\d{1,20}+)?+(?:[eE][+-]?\d{1,2}+)?+)"
_USUAL_BEHIND_ANOTHER = re.compile(rb"\n" + _USUAL_LINE.replace(_VALUE, _FINITE) + rb"(?=[\r\n])")
_MOST_AT_ONCE = 1 << 16
"""Bytes of text in which all usual lines are sought at once: in more, they may be far apart."""


@dataclass(frozen=True, slots=True)
class UsualSteps:
    """Usual lines of successive steps, with finite losses, among other lines."""

    first_step: int
    last: int
    losses: tuple[bytes, ...]
    """As printed; like the others, they are all numbers."""
    step_times: tuple[bytes, ...]
    rates: tuple[bytes, ...] | None
    gbs: int | None
    samples: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.losses)

    @property
    def first(self) -> StepLine:
        return self._line(0)

    @property
    def final(self) -> StepLine:
        return self._line(self.count - 1)

    @property
    def numbers(self) -> "array[int]":
        return array("q", range(self.first_step, self.first_step + self.count))

    def column(self, name: bytes, inside: slice) -> "array[float]":
        """The values of a field in the lines ``inside``, nan if they do not have it."""
        texts = self.rates if name == TFLOPS_FIELD else self.step_times
        return array("d", map(float, texts[inside] if texts else ["nan"] * len(self.losses[inside])))

    def __iter__(self) -> Iterator[StepLine]:
        return map(self._line, range(self.count))

    def _line(self, at: int) -> StepLine:
        rate = None if self.rates is None else float(self.rates[at])
        line = StepLine(self.first_step + at, self.last, float(self.step_times[at]), float(self.losses[at]), rate)
        return line._replace(gbs=self.gbs, samples=self.samples[at])


class Nemo2Reader:
    """Reads step lines; drops one that ends in the middle of a value."""

    def __init__(self) -> None:
        self.before: tuple[bytes, bytes] = b"", b""
        """The fields of the two lines before."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterable[StepLine]:
        end = min(end, len(text))
        if usual := find_usual(text, start, end):
            final = text.rfind(STEP_LINE_HEAD, start, end)
            for head in (text.rfind(STEP_LINE_HEAD, start, final), final):
                if head >= 0:
                    self.note(text[text.find(b"|", head) + 1 : _line_end(text, head)])
            return usual
        return self._find_each(text, start, end)

    def _find_each(self, text: bytes, start: int, end: int) -> Iterator[StepLine]:
        at, not_finite = start, has_any(text, NOT_FINITE, start, end)
        # Searching for a field as bytes takes a third of the time of searching for the pattern.
        for field in _step_times(text, start, end):
            if field < at:
                continue
            match = _match_line(text, max(at, field - MAX_LINE_BYTES), field, end)
            at = match.end() if match else field + len(STEP_TIME_FIELD)
            if not match:
                continue
            bad = find_bad_loss(match[0]) if not_finite else None
            if match.re is _USUAL:
                self.before = self.before[1], text[match.end(3) + 2 : at - 1]
                if step := _step_of(rank_before(text, match.start(), start), *match.groups()):
                    yield step if bad is None else step._replace(loss=bad)
                continue
            body = match[4]
            if STEP_LINE_HEAD in body:
                yield from filter(None, _split(match[0], ended=True))
                continue
            is_cut = self.is_cut(body)
            self.note(body)
            if not is_cut and (step := _read(match, rank_before(text, match.start(), start))):
                yield step if bad is None else step._replace(loss=bad)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        found = list(_split(text, ended=False))
        return [step for step in found if step], bool(found) and found[-1] is None

    def is_cut(self, body: bytes) -> bool:
        """Whether a line ends in a value that is read, where the two lines before have further fields: it was split."""
        last = body.rpartition(b"|")[2].strip().partition(b":")[0]
        if last not in _NAMES_READ:
            return False
        names = _names(body)
        return all(len(names) < len(other) and other[: len(names)] == names for other in map(_names, self.before))

    def note(self, body: bytes) -> None:
        """Takes a line for the next to be compared with."""
        self.before = self.before[1], body


def find_usual(text: bytes, start: int, end: int) -> UsualSteps | None:
    """The step lines in ``text[start:end]``, complete lines, if all are usual, unprefixed, and of successive steps.

    A text may not begin with one. It takes a fifth of the time of reading them one by one.
    """
    if end - start > _MOST_AT_ONCE:
        return None
    found = _USUAL_BEHIND_ANOTHER.findall(text, max(0, start - 1), end)
    if not found or len(found) != text.count(STEP_LINE_HEAD, start, end):
        return None
    if has_any(text, NOT_FINITE, start, end):
        return None  # a loss with another name may be
    epochs, printed, totals, batches, global_steps, losses, times, rates, consumed = zip(*found, strict=True)
    first, last = int(printed[0]), int(totals[0])
    if printed != global_steps or {*totals} != {totals[0]} or {*epochs} != {b"0"} or first + len(found) - 1 > last:
        return None  # such as in a later epoch, whose iterations are not the steps
    if printed != _successive(first, len(found)):
        return None
    for field, values in ((TFLOPS_FIELD, rates), (GBS_FIELD, batches)):
        if b"" in values and (any(values) or has(text, field, start, end)):
            return None  # they are at another place
    gbs, samples = int(batches[0]) if batches[0] else None, tuple(map(int, consumed))
    if {*batches} != {batches[0]} or not are_regular(samples):
        return None
    return UsualSteps(first, last, losses, times, rates if rates[0] else None, gbs, samples)


def are_regular(samples: Sequence[int]) -> bool:
    """Whether each step consumed as many."""
    if len(samples) < 2 or (each := samples[1] - samples[0]) <= 0:
        return len({*samples}) < 2
    return list(samples) == list(range(samples[0], samples[0] + each * len(samples), each))


@lru_cache(maxsize=16)
def _successive(first: int, count: int) -> tuple[bytes, ...]:
    """Numbers as they are printed. Many logs are of runs of as many steps."""
    return tuple(b"%d" % number for number in range(first, first + count))


def _line_end(text: bytes, at: int) -> int:
    """Where the complete line at ``at`` ends."""
    newline = text.find(b"\n", at)
    end = text.find(b"\r", at, newline if newline >= 0 else sys.maxsize)
    return newline if end < 0 else end


def _step_times(text: bytes, start: int, end: int) -> list[int]:
    """Where ``text[start:end]`` has step times. CPython searches from the end in less than half of the time."""
    places, until = [], end
    while (place := text.rfind(STEP_TIME_FIELD, start, until)) >= 0:
        places.append(place)
        until = place + len(STEP_TIME_FIELD) - 1
    return places[::-1]


def _match_line(text: bytes, begin: int, field: int, end: int) -> "re.Match[bytes] | None":
    """The line that the step time at ``field`` is in, from its first head; it begins at ``begin`` at the earliest."""
    head = text.rfind(STEP_LINE_HEAD, begin, field)
    if head > begin and text[head - 1] not in b"\r\n":  # there may be another head before it
        head = max(text.rfind(b"\n", begin, field), text.rfind(b"\r", begin, field), begin - 1) + 1
    elif head < 0:
        return None
    while (head := text.find(STEP_LINE_HEAD, head, field)) >= 0:
        usual = _USUAL.match(text, head, end)
        if usual and _is_usual(usual, text):
            return usual
        if match := _LINE.match(text, head, end):
            return match
        head += len(STEP_LINE_HEAD)
    return None


def _is_usual(match: "re.Match[bytes]", text: bytes) -> bool:
    """Whether it is one line only, without a field at another place than the pattern has it."""
    start, end = match.span()
    return text.find(STEP_LINE_HEAD, start + 1, end) < 0 and all(
        match[group] is not None or text.find(name, start, end) < 0
        for group, name in ((4, GBS_FIELD), (8, TFLOPS_FIELD))
    )


def find_steps(text: bytes) -> Iterable[StepLine]:
    """The step lines in ``text``, which consists of complete lines."""
    return Nemo2Reader().find(text, 0, sys.maxsize)


def _names(body: bytes) -> list[bytes]:
    return [field.partition(b":")[0].strip() for field in body.split(b"|")]


def _split(line: bytes, *, ended: bool) -> Iterator[StepLine | None]:
    """The steps of a line without line end, None for a truncated step: its writer died, or others wrote too."""
    parts = line.split(STEP_LINE_HEAD)[1:]
    for count, part in enumerate(parts, start=1):
        match = _LINE.fullmatch(STEP_LINE_HEAD + part)
        is_whole = ended and count == len(parts)
        step = _read(match, None) if match and (is_whole or _is_complete(match[4])) else None
        yield step if step is None or is_whole else step._replace(samples=None)  # which may be cut


def _is_complete(body: bytes) -> bool:
    """Whether the values that are read are complete although there is no line end."""
    name, _, value = body.rpartition(b"|")[2].strip().partition(b": ")
    return b" consumed_samples: " in body and value != b"" and name not in _NAMES_READ


def _read(match: "re.Match[bytes]", rank: int | None) -> StepLine | None:
    """None if the line has no step time, or a value that is not a number."""
    body = match[4]
    step_time = _STEP_TIME.search(body)
    if not step_time:
        return None
    others = (pattern.search(body) for pattern in (_GBS, _GLOBAL_STEP, _LOSS, _TFLOPS, SAMPLES))
    gbs, global_step, loss, tflops, samples = (found[1] if found else None for found in others)
    return _step_of(rank, match[1], match[2], match[3], gbs, global_step, loss, step_time[1], tflops, samples)


def _step_of(
    rank: int | None,
    epoch: bytes,
    printed: bytes,
    total: bytes,
    gbs: bytes | None,
    global_step: bytes | None,
    loss: bytes | None,
    step_time: bytes,
    tflops: bytes | None,
    samples: bytes | None,
) -> StepLine | None:
    """None for a value that is not a number. After the rank, parameters are in the order of the usual line."""
    iteration, declared = int(printed), int(total)
    before = int(epoch) * (declared + 1)  # if ``declared`` is an epoch's last iteration, and not the run's
    step = int(global_step) if global_step else before + iteration
    counted_from_1 = step == iteration - 1
    last = declared + before if step == before + iteration else declared - counted_from_1
    try:
        loss_value, rate = float(loss) if loss else None, float(tflops) if tflops else None
        line = StepLine(step, max(last, step), float(step_time), loss_value, rate, None, 0, 1, rank)
    except ValueError:
        return None
    return line._replace(gbs=int(gbs) if gbs else None, samples=int(samples) if samples else None)


FORMAT = Format(
    name="nemo2",
    title="NeMo 2",
    marks=(STEP_LINE_HEAD, LOAD_HEAD),
    step=re.compile(
        _HEAD + rb"(?=[^\r\n]{0,%d}+(?:[\r\n]|\Z))[^\r\n]{0,%d}?" % (MAX_BODY_BYTES, MAX_BODY_BYTES) + STEP_TIME_FIELD
    ),
    reader=Nemo2Reader,
    mean_of_interval=True,
    resumed=re.compile(LOAD_HEAD),
)
