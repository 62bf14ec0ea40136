# SPDX-License-Identifier: Apache-2.0
"""Error messages without the stack traces that torch.distributed.checkpoint adds."""

import pickle

from torch.distributed.checkpoint.api import CheckpointException

BROKEN_PICKLE = (OSError, ValueError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError)
"""The exceptions that reading a damaged pickle can raise, according to pickle's documentation."""


def torch_message(error: BaseException) -> str:
    """The reason of the first rank that failed, or the message of the error, on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = min(error.failures.items())[1][0]
    return " ".join(str(error).split()) or type(error).__name__
