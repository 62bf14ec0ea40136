# SPDX-License-Identifier: Apache-2.0
"""Everything small that fine-tuning starts from, made here: samples and a model with its tokenizer."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import find_model
from llmb.errors import UsageError
from llmb.prepare.dataset import source_of
from llmb.prepare.needed import check_installed
from llmb.prepare.small_data import squad_rows
from llmb.prepare.small_model import write_model
from llmb.runs.new_folder import new_folder

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
