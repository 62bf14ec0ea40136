# SPDX-License-Identifier: Apache-2.0
"""What workers compute on."""

from typing import Literal

Device = Literal["cpu", "cuda"]
