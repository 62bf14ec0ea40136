# SPDX-License-Identifier: Apache-2.0
"""The collectives that a rank is in, from PyTorch's flight recorder, and the code that its main thread is in.

The recorder keeps the latest 2,000 collectives of every group in memory, by default and with gloo as with NCCL. It
does not record gloo's sends and receives; for those the code that waits for them is reported.
"""

import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from llmb.runs.failure import Wait, ranks_text

RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""One for gloo, one for NCCL if the build has it."""
DISTRIBUTED = str(Path(dist.__file__).parent)
PROJECT = str(Path(__file__).parents[2])
CHECKPOINT_GROUP = "checkpoint"
"""The group whose collectives are not part of training; see ``Saver``."""


class Collectives(NamedTuple):
    """Unfinished collectives, the oldest first, and the number of collectives begun, by group."""

    waits: tuple[Wait, ...]
    begun: dict[str, int]


def pending_collectives(*, saving: bool) -> Collectives:
    """This rank's collectives. Those of an asynchronous checkpoint count only while training waits for it."""
    waits: list[Wait] = []
    begun: dict[str, int] = {}
    for entry in _entries():
        group, label = entry["process_group"]
        if entry["is_p2p"] or (label == CHECKPOINT_GROUP and not saving):
            continue
        begun[group] = max(begun.get(group, 0), entry["collective_seq_id"])
        if not entry["retired"] and entry["state"] != "completed":
            operation = entry["profiling_name"].partition(":")[2]
            waits.append(
                Wait(
                    operation=operation,
                    group=group,
                    label=label if label != "undefined" else group,
                    number=entry["collective_seq_id"],
                    ranks=ranks_text(_members(group)),
                )
            )
    return Collectives(tuple(waits[:1]), begun)


def _entries() -> Iterator[dict[str, Any]]:
    for name in RECORDERS:
        dump: Callable[[bool, bool], bytes] | None = getattr(c10d, name, None)
        if dump:
            yield from json.loads(dump(True, False)).get("entries", ())


def _members(group: str) -> list[int]:
    """Ranks of a group, by the name that torch gave it."""
    try:
        return dist.get_process_group_ranks(c10d._resolve_process_group(group))  # type: ignore[arg-type]
    except RuntimeError:  # it is destroyed, or not yet registered
        return []


def main_thread_location() -> tuple[str | None, bool]:
    """The project's line that the main thread is in, what it called there, and whether that communicates."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return None, False
    frames = [outer for outer, _ in traceback.walk_stack(frame)]
    inside = list(takewhile(lambda found: not _is_in(PROJECT, found), frames))
    communicates = any(_is_in(DISTRIBUTED, found) for found in inside)
    own = frames[min(len(inside), len(frames) - 1)]
    inner = frames[0]
    text = _line(own) if own is inner else f"{_line(own)}, in {_line(inner)}"
    return text, communicates


def _is_in(folder: str, frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(folder)


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
