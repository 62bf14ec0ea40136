# SPDX-License-Identifier: Apache-2.0
"""A type for values that are unknown, with the reason."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Missing:
    """An unknown value, and the reason why it is unknown. It is falsy, like None."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False
