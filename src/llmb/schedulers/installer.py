# SPDX-License-Identifier: Apache-2.0
"""What an installation asks of its user: questions that a scheduler brings have the same form as all others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llmb.errors import closest
from llmb.schedulers.offer import Offer

NONE = "none"
"""Answers a question that has an answer on other clusters; a question without an answer is open."""


@dataclass(frozen=True, slots=True)
class Choice:
    value: str
    meaning: str = ""


class Question:
    """One answer, with the answers before it at hand."""

    name: ClassVar[str]
    """Name of the answer's field."""
    text: ClassVar[str]
    closed: ClassVar[bool] = True
    """If there are choices, no other answer is valid."""
    several: ClassVar[bool] = False
    """Answers are separated by commas."""
    is_asked: ClassVar[bool] = True
    """On a terminal; what is assumed is taken otherwise."""

    def applies(self) -> bool:
        return True

    def choices(self) -> Sequence[Choice]:
        return ()

    def assumed(self) -> str | None:
        """What holds without an answer; None if that cannot be known, and an answer is required."""
        return None

    def check(self, value: str) -> str | None:  # noqa: ARG002 (nothing is wrong by default)
        """What is wrong with a value that is among the choices, or of a question without choices."""
        return None

    def problem(self, value: str) -> str | None:
        """What is wrong with an answer."""
        names = [choice.value for choice in self.choices()]
        given = [item.strip() for item in value.split(",")] if self.several else [value]
        wrong = [item for item in given if self.closed and names and item not in names]
        if wrong:
            near = closest(wrong[0], names, cutoff=0.5, most=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            return f"'{wrong[0]}' is not one of: {', '.join(names)}{hint}"
        return self.check(value)


class SchedulerQuestion(Question):
    """A question of one scheduler, with what that offers."""

    after: ClassVar[str] = "scheduler"
    """The general question that it follows."""

    def __init__(self, answers: Any, offer: Offer) -> None:  # noqa: ANN401 (with the fields that it declares)
        self.answers = answers
        self.offer = offer
