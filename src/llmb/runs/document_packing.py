# SPDX-License-Identifier: Apache-2.0
"""The documents that the sequences of a run are packed from. Pure."""

from collections.abc import Iterator
from typing import Any

from llmb.catalogue.records import Packing, Recipe, Training
from llmb.metrics.packing import SHORTEST_MEAN, fitted_mean, scaled_mean, synthetic_packing


def document_problems(training: Training, seq_len: int) -> Iterator[str]:
    mean = training.document_tokens
    if not mean:
        return
    if mean < SHORTEST_MEAN:
        yield f"--document-tokens is {mean}; it must be 0 or at least {SHORTEST_MEAN}: one token predicts nothing"
    elif mean > seq_len:
        yield f"documents of {mean} tokens on average are longer than a sequence, {seq_len}; lower --document-tokens"


def with_documents(recipe: Recipe, training: Training) -> Recipe:
    """The recipe with ``training``, and with the statistics of the documents that it then trains on.

    If a recipe packs and ``training`` specifies no documents, their length is chosen for the same attention cost.
    """
    seq_len = recipe.layout.seq_len
    usual = _usual_mean(recipe, training)
    mean = usual if training.document_tokens is None else training.document_tokens
    if mean == 0:
        return _unpacked(recipe, training)
    if mean is None:
        return recipe.model_copy(update={"training": training})
    changes: dict[str, Any] = {
        "training": training.model_copy(update={"document_tokens": mean}),
        "packing": synthetic_packing(recipe.model, seq_len, mean, training.document_lengths),
    }
    if mean != usual:
        # Published figures hold only for the recipe's own data.
        reason = f"sequences are packed from documents of {mean} tokens on average"
        changes |= {"published_flops": None, "expectations": (), "expectations_reason": reason}
    return recipe.model_copy(update=changes)


def _unpacked(recipe: Recipe, training: Training) -> Recipe:
    """The recipe with ``training`` on sequences that are one document each."""
    changes: dict[str, Any] = {"training": training, "packing": None}
    if recipe.packing:
        changes |= {"expectations": (), "expectations_reason": "each sequence is one document; the recipe's are packed"}
    return recipe.model_copy(update=changes)


def _usual_mean(recipe: Recipe, training: Training) -> int | None:
    """Mean tokens of the documents, if they are not specified; None if a sequence is one document."""
    seq_len = recipe.layout.seq_len
    if recipe.packing:
        return fitted_mean(recipe.packing.sum_of_squares, seq_len, training.document_lengths)
    return scaled_mean(seq_len) if training.document_lengths == "squad" else None


def with_packing(recipe: Recipe, training: Training, packing: Packing) -> Recipe:
    """The recipe with ``training`` on a packed dataset, whose statistics are ``packing``."""
    whole = {"document_tokens": None, "document_lengths": "uniform"}
    changes = {"training": training.model_copy(update=whole), "packing": packing}
    return recipe.model_copy(update=changes)
