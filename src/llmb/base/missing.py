# SPDX-License-Identifier: Apache-2.0
"""A value that is not known, and why."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Missing:
    """Stands where the value would. It is false, so that ``if value`` tells whether there is one."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False
