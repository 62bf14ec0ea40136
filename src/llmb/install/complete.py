# SPDX-License-Identifier: Apache-2.0
"""Completes answers: asks on a terminal, assumes what can be known, and names all that is missing."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from llmb.errors import UsageError
from llmb.install.answers import ALL, LISTED, Answers, absolute, flag_of, given_answers
from llmb.install.detect import Surroundings
from llmb.install.questions import QUESTIONS, Path, workloads_for
from llmb.schedulers.installer import Question
from llmb.schedulers.lookup import find_scheduler

Ask = Callable[[Question, str | None], str]
"""Gets a question, and what is wrong with the answer so far; returns an answer without a problem."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """An answer that is missing, or wrong."""

    question: Question
    problem: str | None

    def text(self) -> str:
        what = self.problem or "it is not specified"
        line = f"{flag_of(self.question.name)}: {what}"
        choices = self.question.choices()
        if self.problem is None and choices:
            line += f"; valid: {', '.join(choice.value for choice in choices)}"
        return line


class Interview:
    """The answers so far, and those that are lacking where none can be asked for."""

    def __init__(self, answers: Answers, ask: Ask | None) -> None:
        self.answers, self.ask = answers, ask
        self.lacking: list[Lacking] = []

    def settle(self, question: Question) -> None:
        """Takes the answer that is given, asked for, or assumed."""
        if not question.applies():
            return
        given = answer_text(self.answers, question.name)
        problem = question.problem(given) if given is not None else None
        if given is not None and not problem:
            self._take(question, given)
        elif self.ask and (question.is_asked or problem):
            self._take(question, self.ask(question, problem))
        else:
            assumed = question.assumed()
            if not problem and assumed is not None:
                problem = question.problem(assumed)
            if problem or assumed is None:
                self.lacking.append(Lacking(question, problem))
            else:
                self._take(question, assumed)

    def _take(self, question: Question, value: str) -> None:
        if question.name == "python":
            value = shutil.which(str(absolute(value)) if "/" in value else value) or value  # or a version
        given = given_answers({question.name: [value] if question.name in LISTED else value})
        self.answers = self.answers.model_copy(update={question.name: getattr(given, question.name)})

    def complete(self) -> Answers:
        """Raises UsageError with all that is missing, or wrong."""
        if self.lacking:
            lines = "\n".join(f"  {item.text()}" for item in self.lacking)
            noun = "an answer is" if len(self.lacking) == 1 else f"{len(self.lacking)} answers are"
            do = "give the options, or their keys in --config FILE; on a terminal 'llmb install' asks"
            raise UsageError(f"{noun} missing or wrong:\n{lines}", do=do)
        return self.answers


def completed_path(answers: Answers, around: Surroundings, ask: Ask | None) -> Answers:
    """The first answer, which may lead to earlier ones. Raises UsageError."""
    interview = Interview(answers, ask)
    interview.settle(Path(answers, around))
    return interview.complete()


def completed(answers: Answers, around: Surroundings, ask: Ask | None) -> Answers:
    """All other answers. Raises UsageError with all that is missing, or wrong, at once."""
    if problems := list(answers.problems()):
        raise UsageError("\n".join(problems))
    interview = Interview(answers, ask)
    for kind in QUESTIONS:
        interview.settle(kind(interview.answers, around))
        name = interview.answers.scheduler
        if name and name not in around.unusable:
            for own in find_scheduler(name).questions:
                if own.after == kind.name:
                    interview.settle(own(interview.answers, around.offer(name)))
    found = interview.complete()
    if ALL not in found.workloads:
        return found
    return found.model_copy(update={"workloads": tuple(workloads_for(found.gpu_type, around))})


def answer_text(answers: Answers, name: str) -> str | None:
    """An answer as it would be typed; None if it is open."""
    value = getattr(answers, name)
    if value is None or value == ():
        return None
    return ",".join(value) if isinstance(value, tuple) else str(value)
