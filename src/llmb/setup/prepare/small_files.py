# SPDX-License-Identifier: Apache-2.0
"""Small inputs for fine-tuning, created here: samples, and a model with its tokenizer."""

import json
import math
import random
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmb.base.errors import UsageError, check_installed
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Model
from llmb.catalogue.resolve import find_model, source_of
from llmb.runs.checkpoints.checkpoint_files import new_folder
from llmb.runs.huggingface.model_config import config_of
from llmb.runs.huggingface.tensors import CONFIG, SINGLE_FILE, Shape, WeightsFormat, format_of, stored_tensors
from llmb.setup.prepare.tokenizer import NAMING, TOKENIZER

if TYPE_CHECKING:
    import numpy as np


SEED = 1234
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SPECIAL = (BOS, EOS)


def write_model(folder: Path, model: Model, texts: Iterable[str]) -> None:
    """Write configuration, weights and tokenizer to the existing ``folder``."""
    from safetensors.numpy import save

    size = train_tokenizer(folder / TOKENIZER, model, texts)
    naming = {"bos_token": BOS, "eos_token": EOS, "model_max_length": model.max_seq_len}
    _write_json(folder / NAMING[0], {**naming, "tokenizer_class": "PreTrainedTokenizerFast"})
    numbers = {"bos_token_id": SPECIAL.index(BOS), "eos_token_id": SPECIAL.index(EOS)}
    _write_json(folder / CONFIG, {**config_of(model, "fp32"), **numbers})
    assert size <= model.vocab_size
    (folder / SINGLE_FILE).write_bytes(save(dict(_weights(model)), {"format": "pt"}))


def train_tokenizer(file: Path, model: Model, texts: Iterable[str]) -> int:
    """Train and save a byte-level BPE tokenizer like Llama's, within the model's vocabulary; return its token count."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=model.vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(file))
    return int(tokenizer.get_vocab_size())


def parameter_shapes(model: Model) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of the parameters of a Llama model, as in the engine, without torch."""
    hidden, heads = model.hidden_size, model.head_dim
    yield "embed_tokens.weight", (model.vocab_size, hidden)
    for layer in range(model.layers):
        at = f"layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (model.attention_heads * heads, hidden)
        yield f"{at}.self_attn.k_proj.weight", (model.kv_heads * heads, hidden)
        yield f"{at}.self_attn.v_proj.weight", (model.kv_heads * heads, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, model.attention_heads * heads)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield from _feed_forward(model, layer, f"{at}.mlp")
    yield "norm.weight", (hidden,)
    if not model.tied_embeddings:
        yield "lm_head.weight", (model.vocab_size, hidden)


def _feed_forward(model: Model, layer: int, at: str) -> Iterator[tuple[str, Shape]]:
    if model.moe is None or not model.is_moe_layer(layer):
        yield from _mlp(at, model.hidden_size, model.ffn_hidden_size)
        return
    moe = model.moe
    yield f"{at}.experts.gate_up_proj", (moe.experts, model.hidden_size, 2, moe.ffn_hidden_size)
    yield f"{at}.experts.down_proj", (moe.experts, moe.ffn_hidden_size, model.hidden_size)
    yield f"{at}.router.weight", (moe.experts, model.hidden_size)
    if moe.shared_ffn_hidden_size:
        yield from _mlp(f"{at}.shared_expert", model.hidden_size, moe.shared_ffn_hidden_size)


def _mlp(at: str, hidden: int, ffn: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.gate_proj.weight", (ffn, hidden)
    yield f"{at}.up_proj.weight", (ffn, hidden)
    yield f"{at}.down_proj.weight", (hidden, ffn)


def _weights(model: Model) -> "Iterator[tuple[str, np.ndarray]]":
    """Yield random weights, scaled so that every layer preserves the magnitude of its input, and adapters can learn."""
    import numpy as np

    form: WeightsFormat = format_of(model)
    drawn = np.random.default_rng(SEED)
    for name, shape in parameter_shapes(model):
        for stored, stored_shape in stored_tensors(name, shape, form).items():
            if len(stored_shape) == 1:
                yield stored, np.ones(stored_shape, dtype=np.float32)
                continue
            # Stacked experts are stored as [experts, inputs, outputs], other matrices as [outputs, inputs].
            inputs = 1 if "embed_tokens" in name else stored_shape[1]
            yield stored, drawn.standard_normal(stored_shape, dtype=np.float32) / np.float32(math.sqrt(inputs))


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


TEXTS = 1200
LONGEST = 8
"""Maximum number of facts in a text."""
QUESTIONS = 3
"""Maximum number of questions per text."""

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
    """A sentence, a question about it, and the answer."""

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
    """Yield deterministic rows with the keys of SQuAD on the hub."""
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
    count = 1 + int(LONGEST * drawn.random() ** 2)
    places = [(name, kind) for name in NAMES for kind in KINDS]
    facts = []
    for name, (sentence, question, answers) in drawn.sample(places, count):
        answer = drawn.choice(answers)
        facts.append(Fact(sentence.format(name, answer=answer), question.format(name), answer))
    return facts


SAMPLES, MODEL = "squad.jsonl", "model"
SIZE = "tiny"
"""The only size with weights that are created within seconds."""


def write_small_files(catalogue: Catalogue, workload: str, size: str, folder: Path) -> None:
    """Write ``squad.jsonl`` and ``model/`` to a new folder, deterministically.

    Raise UsageError for an unsuitable size, workload or folder, or EnvironmentProblem.
    """
    source_of(catalogue, workload, size)
    if size != SIZE:
        do = f"pass --size {SIZE}; for {size}, use 'llmb prepare dataset' and 'llmb prepare checkpoint'"
        raise UsageError(f"small files are only available for size {SIZE}", do=do)
    check_installed("making a small model", "numpy", "safetensors", "tokenizers")
    rows = list(squad_rows())
    texts = [f"Context: {row['context']} Question: {row['question']} Answer:" for row in rows]
    with new_folder(folder) as partial:
        with (partial / SAMPLES).open("w") as stream:
            stream.writelines(f"{json.dumps(row)}\n" for row in rows)
        (partial / MODEL).mkdir()
        write_model(partial / MODEL, find_model(catalogue, workload, size), texts)


def next_commands(workload: str, size: str, folder: Path) -> Sequence[str]:
    """Return the commands that prepare the files in ``folder`` and train on them."""
    model, samples = shlex.quote(str(folder / MODEL)), shlex.quote(str(folder / SAMPLES))
    return (
        f"llmb prepare checkpoint -w {workload} -s {size} --source {model}",
        f"llmb prepare dataset -w {workload} -s {size} --source {samples} --tokenizer {model}",
        f"llmb run -w {workload} -s {size}",
    )
