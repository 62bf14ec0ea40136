# SPDX-License-Identifier: Apache-2.0
"""The progress of a rank, as seen by its watchdog."""

from dataclasses import dataclass

from llmb.runs.stall import Phase


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is in its training."""

    phase: Phase
    step: int


class Progress:
    """Set by the training thread, at the cost of an assignment, and read by the watchdog."""

    def __init__(self, step: int) -> None:
        self.enter("start", step)

    def enter(self, phase: Phase, step: int) -> None:
        self.position = Position(phase, step)
