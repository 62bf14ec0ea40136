# SPDX-License-Identifier: Apache-2.0
import importlib.util
from collections.abc import Callable

import pytest


@pytest.fixture
def triton(needs: Callable[..., None]) -> None:
    needs("triton", importlib.util.find_spec("triton") is not None, "Triton is not installed")
