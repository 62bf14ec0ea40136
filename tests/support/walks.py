# SPDX-License-Identifier: Apache-2.0
"""Which files of the package a call goes through, in the order in which it first enters each."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import llmb

PACKAGE = Path(llmb.__file__).parent


def files_of(call: Callable[[], Any]) -> list[str]:
    """As paths below the package. Modules that are imported meanwhile do not count: importing one is no call."""
    names: dict[str, str | None] = {}
    entered: dict[str, None] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in ("<module>", "<lambda>"):
            return
        path = code.co_filename
        if path not in names:
            names[path] = str(Path(path).relative_to(PACKAGE)) if Path(path).is_relative_to(PACKAGE) else None
        if name := names[path]:
            entered.setdefault(name)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(entered)
