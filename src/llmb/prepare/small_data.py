# SPDX-License-Identifier: Apache-2.0
"""Small data in SQuAD's shape: questions about short texts, whose answers are words of the text. Pure."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

SEED = 1234
TEXTS = 1200
LONGEST = 8
"""Facts in a text; few texts are long, as in SQuAD."""
QUESTIONS = 3
"""Of a text, at most."""

Words = tuple[str, ...]


def _words(text: str) -> Words:
    return tuple(text.split())


NAMES = _words(
    "Anna Boris Clara David Emma Felix Greta Hugo Irene Jonas Karin Leo Maria Nils Olga Paul Rosa Simon Tina Victor"
)
CITIES = _words("Athens Berlin Cairo Dublin Geneva Lima London Madrid Oslo Paris Prague Quito Rome Seoul Tokyo Vienna")
COLORS = _words("black blue brown gray green orange red white yellow")
INSTRUMENTS = _words("cello drums flute guitar harp oboe piano trumpet violin")
FOODS = _words("apples bread carrots cheese fish noodles olives rice soup tomatoes")
NUMBERS = _words("two three four five six seven eight nine ten")
ANIMALS = _words("cats dogs goats hens horses rabbits sheep")


class Fact(NamedTuple):
    """A sentence, a question and its answer; ``{}`` stands for the name."""

    sentence: str
    question: str
    answer: str


KINDS: tuple[tuple[str, str, Words], ...] = (
    ("{} lives in {answer}.", "Where does {} live?", CITIES),
    ("{} was born in {answer}.", "Where was {} born?", CITIES),
    ("{} wears a {answer} hat.", "What color is the hat of {}?", COLORS),
    ("{} plays the {answer}.", "What does {} play?", INSTRUMENTS),
    ("{} likes {answer}.", "What does {} like?", FOODS),
    ("{} has {answer}.", "How many animals does {} have?", tuple(f"{n} {a}" for n in NUMBERS for a in ANIMALS)),
)


def squad_rows() -> Iterator[dict[str, Any]]:
    """The same rows at every call, with the keys of the hub's dataset."""
    drawn = random.Random(SEED)  # noqa: S311 (the same data everywhere is the purpose)
    for number in range(TEXTS):
        facts = _facts(drawn)
        context = " ".join(fact.sentence for fact in facts)
        for which, fact in enumerate(facts[:QUESTIONS]):
            start = context.index(fact.sentence) + fact.sentence.index(fact.answer)
            yield {
                "id": f"{number:04d}-{which}",
                "title": f"Text {number}",
                "context": context,
                "question": fact.question,
                "answers": {"text": [fact.answer], "answer_start": [start]},
            }


def _facts(drawn: random.Random) -> list[Fact]:
    """Between one and the most, about different persons, or different facts about the same one."""
    count = 1 + int(LONGEST * drawn.random() ** 2)
    places = [(name, kind) for name in NAMES for kind in KINDS]
    facts = []
    for name, (sentence, question, answers) in drawn.sample(places, count):
        answer = drawn.choice(answers)
        facts.append(Fact(sentence.format(name, answer=answer), question.format(name), answer))
    return facts
