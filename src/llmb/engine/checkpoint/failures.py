# SPDX-License-Identifier: Apache-2.0
"""What went wrong, without the stack traces that torch.distributed.checkpoint puts into its errors."""

from torch.distributed.checkpoint.api import CheckpointException


def said_by_torch(error: BaseException) -> str:
    """The reason of the first rank that failed, or the error's own words, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = min(error.failures.items())[1][0]
    return " ".join(str(error).split()) or type(error).__name__
