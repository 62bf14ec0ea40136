# SPDX-License-Identifier: Apache-2.0
"""Completes answers: asks on a terminal, assumes what can be known, and names all that is missing."""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmb.errors import UsageError
from llmb.install.answers import ALL, Answers, absolute, flag_of, given_answers
from llmb.install.detect import Surroundings
from llmb.install.questions import PATH, QUESTIONS, Choice, Question, workloads_for

Ask = Callable[[Question, tuple[Choice, ...], str | None, Callable[[str], str | None]], str]
"""Gets a question, its choices, what is assumed, and what tells the problem of an answer; returns an answer without
one."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """An answer that is missing, or wrong."""

    question: Question
    choices: tuple[Choice, ...]
    problem: str | None

    def text(self) -> str:
        what = self.problem or "it is not specified"
        line = f"{flag_of(self.question.name)}: {what}"
        if self.problem is None and self.choices:
            line += f"; valid: {', '.join(choice.value for choice in self.choices)}"
        return line


def completed_path(answers: Answers, around: Surroundings, default: str | None, ask: Ask | None) -> Answers:
    """The first answer, which may lead to earlier ones. Raises UsageError."""
    found, lacking = _answered(PATH, answers, around, ask, default)
    _raise([lacking] if lacking else [])
    return found


def completed(answers: Answers, around: Surroundings, ask: Ask | None) -> Answers:
    """All other answers. Raises UsageError with all that is missing, or wrong, at once."""
    if problems := list(answers.problems()):
        raise UsageError("\n".join(problems))
    lacking = []
    for question in QUESTIONS:
        if question.applies(answers, around):
            answers, wrong = _answered(question, answers, around, ask, question.assumed(answers, around))
            lacking += [wrong] if wrong else []
    _raise(lacking)
    return _with_all_workloads(answers, around)


def _answered(
    question: Question, answers: Answers, around: Surroundings, ask: Ask | None, assumed: str | None
) -> tuple[Answers, Lacking | None]:
    choices = tuple(question.choices(answers, around))
    given = answer_text(answers, question.name)
    problem = question.problem(given, answers, around) if given is not None else None
    if given is not None and not problem:
        return _with(answers, question, given), None
    if ask and (question.is_asked or problem):
        if problem:
            question = _told(question, problem)
        value = ask(question, choices, assumed, lambda text: question.problem(text, answers, around))
        return _with(answers, question, value), None
    if not problem and assumed is not None:
        problem = question.problem(assumed, answers, around)
    if problem or assumed is None:
        return answers, Lacking(question, choices, problem)
    return _with(answers, question, assumed), None


def _told(question: Question, problem: str) -> Question:
    from dataclasses import replace

    return replace(question, text=f"{problem}\n{question.text}")


def answer_text(answers: Answers, name: str) -> str | None:
    """An answer as it would be typed; None if it is open."""
    value = getattr(answers, name)
    if value is None or value == ():
        return None
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _with(answers: Answers, question: Question, value: str) -> Answers:
    if question.name == "python":
        value = shutil.which(str(absolute(value)) if "/" in value else value) or value  # or a version
    given = given_answers({question.name: [value] if question.name == "workloads" else value})
    return answers.model_copy(update={question.name: getattr(given, question.name)})


def _with_all_workloads(answers: Answers, around: Surroundings) -> Answers:
    if ALL not in answers.workloads:
        return answers
    return answers.model_copy(update={"workloads": tuple(workloads_for(answers.gpu_type, around))})


def _raise(lacking: Iterable[Lacking]) -> None:
    found = list(lacking)
    if found:
        lines = "\n".join(f"  {item.text()}" for item in found)
        noun = "an answer is" if len(found) == 1 else f"{len(found)} answers are"
        do = "give the options, or their keys in --config FILE; on a terminal 'llmb install' asks"
        raise UsageError(f"{noun} missing or wrong:\n{lines}", do=do)
