# SPDX-License-Identifier: Apache-2.0
"""A value that is unknown, and the reason."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Missing:
    """Stands in for the value. It is false, so ``if value`` checks whether there is one."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False
