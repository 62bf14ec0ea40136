# SPDX-License-Identifier: Apache-2.0
"""Which recipe fits the GPUs there are."""

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request
from llmb.nodes.acceptance.recipe_choice import choose_recipes
from llmb.verdict.expectations_file import find_acceptance_set


@pytest.mark.parametrize(
    ("gpu_type", "gpus", "words", "has_figure"),
    [
        ("a100", 1, "-w pretrain_llama3.1 -s 8b --dtype bf16 --scale 1 --gpu-type a100", False),
        ("h100", 4, "-w pretrain_llama3.1 -s 8b --dtype bf16,fp8 --scale 1 --gpu-type h100", False),
        ("h100", 8, "-w pretrain_llama3.1 -s 8b --dtype bf16,fp8 --scale 8 --gpu-type h100", True),
        ("h100", 48, "-w pretrain_nemotron4 -s 15b --dtype bf16,fp8 --scale 32 --gpu-type h100", True),
        ("b200", 8, "-w pretrain_llama3.1 -s 8b --dtype bf16,fp8 --scale 8 --gpu-type b200", False),
        (None, 3, "-w pretrain_llama3.1 -s tiny --scale 2", False),
        ("cpu", 2, "-w pretrain_llama3.1 -s tiny", False),
    ],
)
def test_the_recipe_of_all_gpus_else_a_proxy_else_a_tiny_one(
    gpu_type: str | None, gpus: int, words: str, has_figure: bool
) -> None:
    (chosen,) = choose_recipes(Catalogue(), None, None, gpu_type, gpus)
    assert (" ".join(chosen.arguments()), chosen.has_figure) == (words, has_figure)


def test_a_set_and_a_wanted_recipe_need_their_gpus() -> None:
    catalogue, accepted = Catalogue(), find_acceptance_set("h100-128")
    assert [one.size for one in choose_recipes(catalogue, None, accepted, "h100", 128)] == ["8b", "70b", "15b"]
    for gpu_type, gpus in (("b200", 128), ("h100", 64)):
        with pytest.raises(UsageError, match="acceptance set h100-128"):
            choose_recipes(catalogue, None, accepted, gpu_type, gpus)
    wanted = Request(workload="pretrain_llama3.1", size="8b", scale=16)
    with pytest.raises(UsageError, match="--scale is 16, but the number of available GPUs is 8"):
        choose_recipes(catalogue, wanted, None, "h100", 8)
