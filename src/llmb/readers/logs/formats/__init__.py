# SPDX-License-Identifier: Apache-2.0
"""The readers of all supported log formats."""

from llmb.readers.logs.formats import deepspeed, huggingface, maxtext, megatron, nanotron, nemo1, nemo2, torchtitan
from llmb.readers.logs.formats.format import Format

FORMATS: tuple[Format, ...] = (
    nemo2.FORMAT,
    megatron.FORMAT,
    nemo1.FORMAT,
    torchtitan.FORMAT,
    maxtext.FORMAT,
    deepspeed.FORMAT,
    huggingface.FORMAT,
    nanotron.FORMAT,
)


def format_called(name: str) -> Format:
    return next(item for item in FORMATS if item.name == name)
