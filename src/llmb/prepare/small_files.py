# SPDX-License-Identifier: Apache-2.0
"""Everything small that fine-tuning starts from, made here: samples and a model with its tokenizer."""

import json
import random
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import find_model
from llmb.checkpoints.new_folder import new_folder
from llmb.errors import UsageError
from llmb.prepare.dataset import source_of
from llmb.prepare.needed import check_installed
from llmb.prepare.small_model import write_model

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


SAMPLES, MODEL = "squad.jsonl", "model"
SIZE = "tiny"
"""A size whose weights are made in seconds."""


def write_small_files(catalogue: Catalogue, workload: str, size: str, folder: Path) -> None:
    """Writes ``squad.jsonl`` and ``model/`` to a new folder; the same files at every call.

    Raises UsageError for another size than tiny, or if ``folder`` exists; EnvironmentProblem if writing fails, or if a
    package is missing.
    """
    source_of(catalogue, workload, size)
    if size != SIZE:
        do = f"give --size {SIZE}; 'llmb prepare dataset' and 'llmb prepare checkpoint' get data and weights of {size}"
        raise UsageError(f"small files are made for size {SIZE} only", do=do)
    check_installed("making a small model", "numpy", "safetensors", "tokenizers")
    rows = list(squad_rows())
    texts = [f"Context: {row['context']} Question: {row['question']} Answer:" for row in rows]
    with new_folder(folder) as partial:
        with (partial / SAMPLES).open("w") as stream:
            stream.writelines(f"{json.dumps(row)}\n" for row in rows)
        (partial / MODEL).mkdir()
        write_model(partial / MODEL, find_model(catalogue, workload, size), texts)


def next_commands(workload: str, size: str, folder: Path) -> Sequence[str]:
    """What prepares the files of ``folder``, and trains on them."""
    model, samples = shlex.quote(str(folder / MODEL)), shlex.quote(str(folder / SAMPLES))
    return (
        f"llmb prepare checkpoint -w {workload} -s {size} --source {model}",
        f"llmb prepare dataset -w {workload} -s {size} --source {samples} --tokenizer {model}",
        f"llmb run -w {workload} -s {size}",
    )
