# SPDX-License-Identifier: Apache-2.0
"""What an installation asks of its user, and what a scheduler offers: its questions have the form of all others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llmb.errors import closest

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Nodes that a scheduler keeps together. None is unknown, or has none of it."""

    name: str
    is_default: bool = False
    nodes: int = 0
    gpus_per_node: int | None = None
    """GPUs of most of its nodes; None if the scheduler does not count GPUs there."""
    gres_type: str | None = None
    architecture: str | None = None
    """As the kernel names it: x86_64, aarch64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a scheduler offers this user."""

    partitions: tuple[Partition, ...] = ()
    accounts: tuple[str, ...] | None = None
    """None if it has no accounting, or does not answer."""
    default_account: str | None = None

    def partition(self, name: str | None) -> Partition | None:
        return next((item for item in self.partitions if item.name == name), None)


class SchedulerQuestion(Question):
    """A question of one scheduler, with what that offers."""

    after: ClassVar[str] = "scheduler"
    """The general question that it follows."""

    def __init__(self, answers: Any, offer: Offer) -> None:  # noqa: ANN401 (with the fields that it declares)
        self.answers = answers
        self.offer = offer
