# SPDX-License-Identifier: Apache-2.0
"""Small files for fine-tuning, made without llmb: data in SQuAD's shape, a tokenizer, and a model of transformers."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import find_model
from llmb.runs.huggingface.model_config import config_of

NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gina", "Hugo", "Ines", "Jack")
CITIES = ("Oslo", "Lima", "Rome", "Cairo", "Delhi", "Quito", "Paris", "Tokyo")
TRADES = ("a baker", "a nurse", "a pilot", "a farmer", "a judge", "a tailor")
QUESTIONS = 1200
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def questions() -> Iterator[dict[str, object]]:
    chance = random.Random(7)
    for number in range(QUESTIONS):
        name, city, trade = chance.choice(NAMES), chance.choice(CITIES), chance.choice(TRADES)
        context = f"{name} is {trade}. {name} lives in {city}."
        asked, answer = chance.choice(
            ((f"Where does {name} live?", city), (f"What is {name}?", trade), (f"Who lives in {city}?", name))
        )
        answers = {"text": [answer], "answer_start": [context.index(answer)]}
        yield {"id": str(number), "title": name, "context": context, "question": asked, "answers": answers}


def write_small_finetuning(folder: Path, workload: str) -> tuple[Path, Path]:
    """A file of questions, and the folder of a Hugging Face model with random weights, as large as ``tiny``."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    samples, model_folder = folder / "squad.jsonl", folder / "model"
    rows = list(questions())
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = find_model(Catalogue(), workload, "tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=model.vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{row['context']} {row['question']}" for row in rows), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.save_pretrained(model_folder)
    torch.manual_seed(7)
    config = AutoConfig.for_model(**config_of(model, "fp32"))
    config.bos_token_id, config.eos_token_id = fast.bos_token_id, fast.eos_token_id
    AutoModelForCausalLM.from_config(config).save_pretrained(model_folder)
    return samples, model_folder
