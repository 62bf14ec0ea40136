# SPDX-License-Identifier: Apache-2.0
"""Which models an installation prepares data and checkpoints of. Pure."""

from collections.abc import Iterator

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request, gpu_types_of, resolve
from llmb.install.answers import Answers

TINY = "tiny"
"""A size that is prepared only if it is asked for."""


def prepared_sizes(catalogue: Catalogue, answers: Answers) -> Iterator[tuple[str, str]]:
    """Workload and size of each: those of the documents that the GPU type can train, or the size that is given."""
    for name in answers.workloads:
        workload = catalogue.workloads.get(name)
        for size in workload.sources if workload else ():
            is_wanted = size == answers.size if answers.size else size != TINY
            if workload and is_wanted and answers.gpu_type in (None, *gpu_types_of(workload, size)):
                yield name, size


def seq_len_of(catalogue: Catalogue, answers: Answers, workload: str, size: str) -> int:
    """The length that the GPU type's layout packs samples to."""
    return resolve(catalogue, Request(workload=workload, size=size, gpu_type=answers.gpu_type)).layout.seq_len
