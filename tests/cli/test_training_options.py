# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from llmb.cli.training_options import OPTIONS, training_options
from llmb.runs.choices import Choices
from llmb.runs.parallelism import Parallelism
from llmb.runs.profiling import Profiling


def test_every_choice_has_an_option() -> None:
    assert set(OPTIONS) == (set(Choices.model_fields) - {"parallelism", "profiling"}) | set(
        Parallelism.model_fields
    ) | set(Profiling.model_fields)


def test_options_make_choices() -> None:
    fields = Choices.model_fields | Parallelism.model_fields | Profiling.model_fields
    given = {name: fields[name].default for name in OPTIONS}
    assert training_options(**given) == Choices()
    changed = training_options(**given | {"seed": 7, "dp_shard_size": 2, "checkpoint_dir": "saved", "profile": True})
    assert changed.seed == 7
    assert changed.profiling == Profiling(profile=True)
    assert changed.parallelism == Parallelism(dp_shard_size=2)
    assert changed.checkpoint_dir == str(Path("saved").absolute())
