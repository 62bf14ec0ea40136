# SPDX-License-Identifier: Apache-2.0
"""The base of records."""

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Base of all records that are written to files: immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Threshold(Record):
    """A number, and why it is that."""

    value: float = Field(gt=0)
    why: str
