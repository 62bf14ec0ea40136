# SPDX-License-Identifier: Apache-2.0
"""The protocol of the program that measures every GPU: one job in, a file of each process out."""

from llmb.bench.jobs import DeviceReport, Timing
from llmb.catalogue.records import Record

PROGRAM = "llmb.bench.worker.every_gpu"
JOB, PARTS = "gpus_job.json", "gpus"
"""A file and a folder, in the folder that the program is called with."""


class PartReport(Record):
    """What one process measured on its GPU, or as one of several on a CPU."""

    node: str
    rank: int
    local_rank: int
    uuid: str | None
    device: DeviceReport | None
    """None if the device cannot be used at all."""
    timing: Timing
