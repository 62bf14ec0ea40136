# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model with the Trainer of transformers, and leaves its logs and the true times in a folder.

A step may take longer by the clock than it does: the clock is moved on, so that a run of a minute takes a second.
"""

import json
import os
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

REAL_TIME = time.time
moved_on_s = 0.0


def now_s() -> float:
    return REAL_TIME() + moved_on_s


time.time = now_s  # before tqdm takes it

import torch  # noqa: E402
from tqdm.auto import tqdm  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, trainer_callback  # noqa: E402

MODEL = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=8,
)
torch.set_num_threads(1)
TOKENS = torch.arange(8)
DATA = [{"input_ids": TOKENS, "labels": TOKENS}] * 64


class Times(TrainerCallback):
    """When steps ended; one such callback is before that of the bar, the other after it."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.ends_s: dict[int, float] = {}
        self.evaluations_s: dict[int, float] = {}
        """By the step before."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.ends_s[state.global_step] = now_s()

    def on_step_end(self, args, state, control, **kwargs):
        global moved_on_s
        moved_on_s += self.step_s * (0.5 + state.global_step % 7 / 6)
        self.ends_s[state.global_step] = now_s()

    def on_prediction_step(self, args, state, control, **kwargs):
        global moved_on_s
        moved_on_s += self.step_s / 3

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.evaluations_s[state.global_step] = metrics["eval_runtime"]


@contextmanager
def output_to(path: Path):
    """Of this process, as a shell does."""
    saved = os.dup(1), os.dup(2)
    with path.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    for stream, old in zip((1, 2), saved, strict=True):
        os.dup2(old, stream)


def train(folder: Path, name: str, *, steps: int, logging_steps: int, step_s: float, resume: str | None = None) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        logging_steps=logging_steps,
        save_steps=20,
        save_strategy="steps" if name == "saved" else "no",
        eval_strategy="steps" if name.startswith("evaluated") else "no",
        eval_steps=steps // 2,
        per_device_eval_batch_size=2,  # an evaluation has as many steps as the training
        report_to=[],
        use_cpu=True,
    )
    before, after = Times(step_s), Times()
    trainer = Trainer(
        LlamaForCausalLM(MODEL), arguments, train_dataset=DATA, eval_dataset=DATA[: 2 * steps], callbacks=[before]
    )
    trainer.callback_handler.callbacks.append(after)  # that of the bar is between them
    begun_s = now_s()
    trainer.train(resume_from_checkpoint=resume)
    times = {"before": before.ends_s, "after": after.ends_s, "evaluations": before.evaluations_s}
    times["wall_s"] = now_s() - begun_s
    with (folder / f"{name}.json").open("a") as file:
        file.write(json.dumps(times) + "\n")


def main(folder: Path) -> None:
    def case(name: str, *, steps: int = 50, logging_steps: int = 10, step_s: float = 0.9, resume: str | None = None):
        with output_to(folder / f"{name}.out"):
            train(folder, name, steps=steps, logging_steps=logging_steps, step_s=step_s, resume=resume)

    case("fast_1", steps=30, logging_steps=1, step_s=0.0)
    case("fast_10", steps=30, step_s=0.0)
    case("slow", logging_steps=1)
    case("saved", steps=20)
    case("resumed", resume=str(folder / "out" / "checkpoint-20"))
    case("evaluated", steps=30)
    trainer_callback.tqdm = partial(tqdm, mininterval=8.0)
    case("rare", steps=60)
    case("rare_resumed", resume=str(folder / "out" / "checkpoint-20"))
    case("evaluated_rare", steps=30)
    trainer_callback.tqdm = tqdm
    with output_to(folder / "two.out"):
        for step_s in (0.9, 1.5):
            train(folder, "two", steps=30, logging_steps=10, step_s=step_s)
    with output_to(folder / "different.out"):
        for steps in (30, 20):
            train(folder, "different", steps=steps, logging_steps=10, step_s=0.9)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
