# SPDX-License-Identifier: Apache-2.0
"""The work of a step as the lines of a log print it: its batch, the samples consumed so far, its tokens, its rate."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmb.logs.formats.format import Value
from llmb.logs.step_line import StepLine

GBS, SEQ_LEN, GPUS = "layout.gbs", "layout.seq_len", "layout.gpus"
MOST_APART = 1.1
"""Rates and times are rounded: the work of two steps, by their product, may differ by this factor."""


@dataclass(slots=True)
class PrintedWork:
    """What the lines of the window tell, and the first of them that does not fit the others."""

    gbs: int | None = None
    """Sequences of a step; None if no line tells."""
    change: str | None = None
    """Why the steps are not of the same work."""
    before: tuple[int, int] | None = None
    """A step, and the samples consumed by its end."""
    work: tuple[float, float] | None = None
    """The fewest and the most tokens of a GPU in a step, by its rate and its time."""
    tokens: Counter[int] = field(default_factory=Counter)
    """How many steps have so many tokens, without padding."""

    def note(self, line: StepLine) -> None:
        """Takes a line of the window; they come in order."""
        if line.tokens is not None:
            self.tokens[line.tokens] += 1
        self.change = self.change or _ramp(line) or self._other_batch(line) or self._other_work(line)

    def _other_batch(self, line: StepLine) -> str | None:
        consumed = self._consumed(line)
        gbs = line.gbs or consumed
        if gbs is None:
            return None
        if consumed and consumed != gbs:
            told = f"the global batch size is {gbs:g}"
            return f"{told} in step {line.step}, and {consumed:g} samples a step were consumed since the line before"
        if self.gbs is None and gbs == int(gbs):
            self.gbs = int(gbs)
        if self.gbs == gbs:
            return None
        before = "" if self.gbs is None else f"from {self.gbs} "
        return f"the global batch size changes {before}to {gbs:g} in step {line.step} of the window"

    def _consumed(self, line: StepLine) -> float | None:
        """Samples a step since the line before."""
        before = self.before
        self.leave(line)
        if before is None or line.samples is None or line.step <= before[0]:
            return None
        return (line.samples - before[1]) / (line.step - before[0])

    def leave(self, line: StepLine) -> None:
        """Takes a line, in the window or not, for the next one to be compared with."""
        if line.samples is not None:
            self.before = line.step, line.samples

    def _other_work(self, line: StepLine) -> str | None:
        if not line.tokens_per_s_per_gpu:
            return None
        work = line.tokens_per_s_per_gpu * line.step_time_s
        least, most = self.work or (work, work)
        self.work = min(least, work), max(most, work)
        if self.work[1] <= MOST_APART * self.work[0]:
            return None
        told = f"by its rate and its time, step {line.step} has {work:,.0f} tokens a GPU"
        return f"{told}, and another step of the window {least if work > least else most:,.0f}"

    def flaw(self, configuration: Mapping[str, Value]) -> str | None:
        """Why the lines are not of one amount of work, or not of that of the configuration."""
        gbs, length, gpus = (_count(configuration, key) for key in (GBS, SEQ_LEN, GPUS))
        if self.change:
            return self.change
        if self.gbs and gbs and self.gbs != gbs:
            return f"the global batch size is {self.gbs} in its lines, and {gbs} by its name or its arguments"
        places = gbs * length if gbs and length else None
        most = max(self.tokens, default=0)
        if places and most > places:
            return f"a step has {most:,} tokens, and the layout {places:,}"
        if places and gpus and self.work and not 1 / MOST_APART < self.work[0] * gpus / places < MOST_APART:
            told = f"by its rate and its time, a step has {self.work[0]:,.0f} tokens a GPU"
            return f"{told}, and by the layout {places / gpus:,.0f}"
        return self._other_tokens()

    def _other_tokens(self) -> str | None:
        """Where most steps have exactly as many tokens as each other, none is padded, and another number is another
        batch."""
        if not self.tokens:
            return None
        usual, count = self.tokens.most_common(1)[0]
        other = next((one for one in self.tokens if not 1 / MOST_APART < one / usual < MOST_APART), None)
        if other is None or 2 * count <= self.tokens.total():
            return None
        return f"a step of the window has {other:,} tokens, and most have {usual:,}"


def _ramp(line: StepLine) -> str | None:
    return f"the global batch size is ramped up in step {line.step} of the window" if line.ramped_up else None


def _count(configuration: Mapping[str, Value], key: str) -> int | None:
    value = configuration.get(key)
    return value if isinstance(value, int) else None
