# SPDX-License-Identifier: Apache-2.0
"""The network that a run used, by what NCCL said of it in the run's folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.input_files import open_regular
from llmb.missing import Missing
from llmb.runs.folder import RunFolder
from llmb.runs.network_faults import NetworkUse, find_faults
from llmb.runs.record import RunRecord
from llmb.traces.folders import NCCL_LOG_END
from llmb.traces.nccl_network import beginning, read_network, source_of

SILENT = "NCCL said nothing of its network in the run's files"


def network_log(folder: RunFolder, rank: int) -> Path:
    """The file with what NCCL said of the network to ``rank``, the first of its node."""
    return folder.nccl_network / f"rank-{rank}{NCCL_LOG_END}"


def report_network(folder: RunFolder, record: RunRecord) -> NetworkUse | Missing:
    plan, environment = record.plan, record.environment
    if plan.device != "cuda":
        return Missing("the ranks talk by gloo, not by NCCL")
    gpu, gpus = Catalogue().gpus.get(plan.recipe.gpu_type), plan.recipe.layout.gpus
    if len(environment.nodes) == 1 if environment else gpu and gpus <= gpu.gpus_per_node:
        return Missing("the run is of one node")
    logs = _logs(folder)
    if not logs:
        return Missing(SILENT)
    source = source_of([str(path.relative_to(folder.path)) for path in logs])
    try:
        network = read_network(_texts(logs), source, gpus)
    except OSError as error:
        return Missing(f"what NCCL said of it cannot be read: {error.strerror}")
    if network is None:
        return Missing(SILENT)
    return NetworkUse(**dict(network), faults=tuple(find_faults(network, environment, gpu)))


def _logs(folder: RunFolder) -> Sequence[Path]:
    """Where the user asked for NCCL's lines himself, they may be in the run's own log."""
    kept = (sorted(path.glob(f"*{NCCL_LOG_END}")) for path in (folder.nccl_network, folder.nccl_trace))
    return next(filter(None, kept), [folder.log] if folder.log.exists() else [])


def _texts(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with open_regular(path) as stream:
            yield from beginning(stream)
