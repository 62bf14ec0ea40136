# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that are left for later are those of an ordinary backward pass."""

from collections.abc import Callable

import pytest
import torch

from llmb.catalogue.records import Model
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.local_shard import Linear
from llmb.engine.model.moe import Experts
from llmb.engine.parallel.delayed_gradients import delay_weight_gradients


def delayed_names(model: Decoder) -> set[str]:
    owners = {name for name, module in model.named_modules() if isinstance(module, Linear | Experts)}
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in owners}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "nemotron4", "llama4", "qwen3-tied", "mixtral"])
def test_matrices_get_their_gradients_later_and_all_else_at_once(
    name: str, dtype: torch.dtype, models: dict[str, Model], randomised: Callable[[Model], Decoder]
) -> None:
    tokens = torch.randint(512, (2, 65), generator=torch.Generator().manual_seed(3))
    ordinary, delayed = (randomised(models[name]).to(dtype) for _ in range(2))
    ordinary(tokens[:, :-1], tokens[:, 1:]).backward()
    left = delay_weight_gradients(delayed)
    delayed(tokens[:, :-1], tokens[:, 1:]).backward()
    add_first = left()
    missing = {name for name, parameter in delayed.named_parameters() if parameter.grad is None}
    assert missing == delayed_names(delayed)
    delayed(tokens[:, :-1], tokens[:, 1:]).backward()
    add_first()
    expected = dict(ordinary.named_parameters())
    for parameter in missing:
        torch.testing.assert_close(delayed.get_parameter(parameter).grad, expected[parameter].grad)
    left()()
    for parameter in missing:
        torch.testing.assert_close(delayed.get_parameter(parameter).grad, 2 * expected[parameter].grad)
