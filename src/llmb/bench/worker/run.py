# SPDX-License-Identifier: Apache-2.0
"""Runs a job: prepares each case, times it, forgets it."""

import platform
from collections.abc import Callable

import torch

from llmb.bench.jobs import (
    AttentionCase,
    BenchProgress,
    Case,
    CaseList,
    CopyCase,
    DeviceReport,
    ProductCase,
    Timing,
    Timings,
    TransferCase,
)
from llmb.bench.worker.attention import AttentionChoices, is_backend
from llmb.bench.worker.copies import copy, transfer
from llmb.bench.worker.launches import launch
from llmb.bench.worker.memory_need import Work, free_bytes, needed_bytes
from llmb.bench.worker.products import product
from llmb.bench.worker.timing import PreparedCall, timed
from llmb.engine.device import device_name, exact_fp32
from llmb.engine.environment import cudnn_text, node_gpus
from llmb.runs.host import host_name

GB = 10**9
CPU_MEMORY_ERRORS = ("can't allocate memory", "not enough memory")


def run_job(job: CaseList, say: Callable[[BenchProgress], None], gpu: int = 0) -> Timings:
    """Times all cases in order; one that the device does not support, or has no memory for, has its reason."""
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
    exact_fp32()
    choices = AttentionChoices(device, job)
    found = []
    for number, case in enumerate(job.cases):
        say(BenchProgress(name=case.name, number=number, total=len(job.cases), seconds=case.sustained_s))
        found.append(attempt(case, choices, device, job))
    return Timings(device=describe(device), timings=tuple(found))


def attempt(case: Case, choices: AttentionChoices, device: torch.device, job: CaseList) -> Timing:
    need, free = needed_bytes(case.work), free_bytes()
    if device.type == "cpu" and free is not None and need > free:
        reason = f"it needs {need / GB:.3g} GB, and {free / GB:.3g} GB of memory are free"
        return Timing(seconds=None, reason=reason, out_of_memory=True)
    try:
        return timed(prepare(case.work, choices, device), device, job, case.sustained_s)
    except torch.OutOfMemoryError as error:
        return Timing(seconds=None, reason=_first_line(error), out_of_memory=True)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        text = _first_line(error)
        return Timing(seconds=None, reason=text, out_of_memory=any(known in text for known in CPU_MEMORY_ERRORS))
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def prepare(work: Work, choices: AttentionChoices, device: torch.device) -> PreparedCall:
    if isinstance(work, ProductCase):
        return PreparedCall(product(work, device), flushes=True)
    if isinstance(work, AttentionCase):
        if not is_backend(work.backend):
            raise ValueError(f"unknown attention backend {work.backend}")
        return choices.prepare(work)
    if isinstance(work, CopyCase):
        return copy(work, device)
    return transfer(work, device) if isinstance(work, TransferCase) else launch(work, device)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def describe(device: torch.device) -> DeviceReport:
    on_gpu = device.type == "cuda"
    cudnn: int | None = torch.backends.cudnn.version() if on_gpu else None
    nccl: tuple[int, ...] = torch.cuda.nccl.version() if on_gpu else ()
    return DeviceReport(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if on_gpu else None,
        cudnn=cudnn_text(cudnn),
        cudnn_number=cudnn,
        nccl=".".join(map(str, nccl)) or None,
        driver=node_gpus(host_name()).driver if on_gpu else None,
        device=device_name(device),
        device_memory_gib=torch.cuda.get_device_properties(device).total_memory / 2**30 if on_gpu else None,
        cpu_threads=torch.get_num_threads(),
    )
