# SPDX-License-Identifier: Apache-2.0
"""Which files of the package a call goes through, in the order in which it first enters each.

``python tests/support/walks.py`` prints those of the page on the design.
"""

import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from job_rows import job_row
from recorded_runs import gpu_record, times_around, write_run

import llmb
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.jobs.history import open_history
from llmb.jobs.local_run import plan_here
from llmb.jobs.refresh import refresh
from llmb.launch.programs.conclude import conclude_run, judge_run
from llmb.launch.programs.port import End
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record

PACKAGE = Path(llmb.__file__).parent
LINE = 118
SHARED = "base/"
"""Files of every walk, which are left out."""


def files_of(call: Callable[[], Any]) -> list[str]:
    """Paths below the package. A module that is imported meanwhile does not count: no function of it is called."""
    entered: dict[str, None] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and not name.startswith("<") and path.startswith(f"{PACKAGE}/"):
            entered.setdefault(path[len(str(PACKAGE)) + 1 :])

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [path for path in entered if not path.startswith(SHARED)]


def walks(folder: Path) -> dict[str, list[str]]:
    """The files of each walk, by its title; ``folder`` is empty."""
    request = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=1)
    parent = folder / "workloads" / "pretrain_llama3.1" / "experiments" / "exp"
    run = RunFolder(write_run(parent, gpu_record(), times_around(12.3)))
    record = read_record(run)
    begun = record.model_copy(update={"status": "running", "result": None})
    with open_history(folder, print) as store:
        store.add([job_row("a", run_dir=str(run.path), scheduler="local", state="RUNNING", status="running")])
        return {
            "A run is planned": files_of(lambda: plan_here(Catalogue(), request, Choices(), {}, folder)),
            "A run is concluded": files_of(lambda: conclude_run(run, begun, End(0))),
            "It is judged by the published figure": files_of(lambda: judge_run(record)),
            "The state of a job": files_of(lambda: refresh(store, folder)),
            "A forward pass in FP8": files_of(_fp8_pass()),
        }


def _fp8_pass() -> Callable[[], object]:
    """A pass of a tiny model whose blocks compute in FP8."""
    import torch

    from llmb.engine.model.decoder import build_model
    from llmb.engine.precision.apply import layers_of
    from llmb.engine.precision.scaling import LayerScales, Scales

    request = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=1)
    decoder = build_model(resolve(Catalogue(), request).model).bfloat16()
    layers = [layer for block in decoder.layers.values() for layer in layers_of(block)]
    scales = Scales(len(layers), torch.device("cpu"), None, delayed=True)
    for number, layer in enumerate(layers):
        layer.replace(LayerScales(scales, number), "fp32")
    tokens = torch.zeros(1, 17, dtype=torch.int64)
    return lambda: decoder(tokens[:, :-1], tokens[:, 1:])


def text_of(title: str, files: list[str]) -> str:
    """A walk as the page has it."""
    return "\n".join(
        [
            f"{title} ({len(files)} files):",
            *textwrap.wrap(
                " > ".join(files),
                LINE,
                initial_indent="  ",
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            ),
        ]
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print("\n\n".join(text_of(title, files) for title, files in walks(Path(made)).items()))
