# SPDX-License-Identifier: Apache-2.0
"""The network that a log shows, whichever program wrote it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmb.input_files import open_regular
from llmb.logs.reader import PlainText

if TYPE_CHECKING:  # few logs have NCCL's lines
    from llmb.traces.nccl_network import Network

NCCL = b" NCCL INFO "
MOST_BYTES = 1 << 25
CHUNK_BYTES = 1 << 20


def logged_network(path: Path) -> "Network | None":
    """By the beginning of a log; None if it does not tell or cannot be read."""
    try:
        with open_regular(path) as stream:
            said = b"".join(text for text in _beginning(PlainText(stream)) if NCCL in text)
    except OSError:
        return None
    if not said:
        return None
    from llmb.traces.nccl_network import read_network

    return read_network([said], str(path))


def _beginning(text: PlainText) -> Iterator[bytes]:
    while text.size < MOST_BYTES and (part := text.read(CHUNK_BYTES)):
        yield part
