# SPDX-License-Identifier: Apache-2.0
"""How torch is set up for a device."""

from collections.abc import Iterator

import pytest
import torch

from llmb.engine.device import leave_free


@pytest.fixture
def free_again() -> Iterator[None]:
    yield
    torch._C._set_sm_carveout_experimental(None)


@pytest.mark.usefixtures("free_again")
@pytest.mark.parametrize(("sms", "device", "left"), [(0, "cuda", None), (16, "cpu", None), (16, "cuda", 16)])
def test_products_of_a_gpu_leave_multiprocessors_free_if_asked(sms: int, device: str, left: int | None) -> None:
    leave_free(sms, torch.device(device, 0))
    assert torch._C._get_sm_carveout_experimental() == left
