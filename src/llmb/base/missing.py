# SPDX-License-Identifier: Apache-2.0
"""The type of a value that is unknown for a stated reason."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Missing:
    """Replaces a value that is unknown. It is falsy, so ``if value`` checks whether there is a value."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False
