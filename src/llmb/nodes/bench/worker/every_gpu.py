# SPDX-License-Identifier: Apache-2.0
"""The program that measures the GPU of its local rank: ``python -m llmb.nodes.bench.worker.every_gpu FOLDER``.

The processes do not communicate, and report a failed GPU without failing, so that it does not affect the others.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from llmb.nodes.bench.measurements import JOB, PARTS, PartReport
from llmb.nodes.bench.protocol import CaseList, Timing
from llmb.nodes.bench.worker.measure_device import leave, run_job, say
from llmb.readers.samples.host import host_name
from llmb.runs.folder import write_atomically


def measure(job: CaseList, local_rank: int, rank: int) -> PartReport:
    device, uuid = None, None
    try:
        if job.device == "cuda" and local_rank >= torch.cuda.device_count():
            raise RuntimeError(f"torch {torch.__version__} finds only {torch.cuda.device_count()} GPUs")
        timings = run_job(job, say if rank == 0 else lambda _: None, local_rank)
        device, (timing,) = timings.device, timings.timings
        uuid = _uuid(local_rank) if job.device == "cuda" else None
    except RuntimeError as error:  # torch raises it for a GPU that is lost, missing or broken
        timing = Timing(seconds=None, reason=str(error).strip().partition("\n")[0])
    return PartReport(node=host_name(), rank=rank, local_rank=local_rank, uuid=uuid, device=device, timing=timing)


def _uuid(local_rank: int) -> str | None:
    """Return the GPU's UUID in the format of nvidia-smi; None if torch does not report it."""
    properties: Any = torch.cuda.get_device_properties(local_rank)
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    job = CaseList.model_validate_json((folder / JOB).read_text())
    report = measure(job, int(os.environ["LOCAL_RANK"]), rank)
    parts = folder / PARTS
    parts.mkdir(exist_ok=True)
    write_atomically(parts / f"{rank}.json", report.model_dump_json())
    leave()


if __name__ == "__main__":
    main()
