# SPDX-License-Identifier: Apache-2.0
"""How far a rank has come, as its watch sees it."""

from dataclasses import dataclass

from llmb.runs.stall import Phase


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is in its training."""

    phase: Phase
    step: int


class Progress:
    """The training thread says where it is, which costs it an assignment; the watch reads it when it likes."""

    def __init__(self, step: int) -> None:
        self.enter("start", step)

    def enter(self, phase: Phase, step: int) -> None:
        self.position = Position(phase, step)
