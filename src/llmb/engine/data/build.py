# SPDX-License-Identifier: Apache-2.0
"""The training data of a plan."""

from llmb.engine.data.batches import TrainingData
from llmb.engine.data.packed import open_packed
from llmb.engine.data.synthetic import SyntheticData
from llmb.runs.plan import EnginePlan


def build_data(plan: EnginePlan) -> TrainingData:
    training = plan.recipe.training
    if plan.dataset:
        return open_packed(plan.dataset, plan.recipe.model.vocab_size, plan.seed)
    return SyntheticData(
        vocab_size=plan.recipe.model.vocab_size,
        seq_len=plan.recipe.layout.seq_len,
        seed=plan.seed,
        distribution=training.data,
        document_tokens=training.document_tokens or None,
        document_lengths=training.document_lengths,
    )
