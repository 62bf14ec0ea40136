# SPDX-License-Identifier: Apache-2.0
"""The devices that workers run on."""

from typing import Literal

Device = Literal["cpu", "cuda"]
