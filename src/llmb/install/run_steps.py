# SPDX-License-Identifier: Apache-2.0
"""Does the steps that are not done, and says which one failed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from llmb.errors import LlmbError, UserInterrupt
from llmb.install.steps import Step

RESUMED = "the same command resumes here"


@dataclass(frozen=True, slots=True)
class StepResult:
    """``kept`` was done before."""

    name: str
    state: Literal["done", "kept", "open"]
    text: str


def run_steps(steps: Sequence[Step], say: Callable[[str], None]) -> list[StepResult]:
    """Raises the error of the first step that fails; those before it are done."""
    results = []
    for number, step in enumerate(steps, start=1):
        if step.is_done():
            results.append(StepResult(step.name, "kept", "done before"))
            continue
        say(f"{number}/{len(steps)} {step.title}")
        try:
            results.append(StepResult(step.name, "done", step.do()))
        except LlmbError as error:
            do = f"{error.do}; {RESUMED}" if error.do else RESUMED
            what = f"step {number} of {len(steps)}, {step.name}: {error.what}"
            raise type(error)(what, where=error.where, choices=error.choices, do=do) from error
        except KeyboardInterrupt as signal:
            raise UserInterrupt(f"interrupted in step {number} of {len(steps)}, {step.name}; {RESUMED}") from signal
    return results


def planned(steps: Sequence[Step]) -> list[StepResult]:
    """What would be done."""
    return [
        StepResult(step.name, "kept", "done before") if step.is_done() else StepResult(step.name, "open", step.title)
        for step in steps
    ]
