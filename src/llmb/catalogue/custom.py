# SPDX-License-Identifier: Apache-2.0
"""The workload of a user's model, which a file describes, with a layout on one GPU as a start."""

import re
from pathlib import Path
from typing import NamedTuple

from llmb.base.errors import UsageError
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import ConfigFile, Dtype, Model
from llmb.catalogue.schema import BatchRule, GpuKind, LayoutRow, LayoutTable, WorkloadFile
from llmb.catalogue.throughput import parameter_count

USER_WORKLOAD = "pretrain_custom"
FAMILY = "custom"
MOST_TOKENS = 4096
MOST_ON_CPU = 500_000_000
"""Parameters of the largest model that runs on a CPU: with gradients and optimizer, 8 GB."""


class UserModel(NamedTuple):
    """A model, and the file that describes it."""

    model: Model
    file: ConfigFile


def size_of_file(path: Path) -> str:
    """Return a model's size: the file's name, without suffix, in lower case; raise UsageError if it is invalid."""
    if not re.fullmatch(r"[\w.+-]+", path.stem, re.ASCII):
        what = "the model's size is the file's name without suffix, which may have only letters, digits and '._+-'"
        raise UsageError(what, where=str(path), do="rename the file")
    return path.stem.lower()


def check_is_listed(name: str) -> None:
    """Raise UsageError for the workload of a user's model, which only a file describes."""
    if name.startswith(USER_WORKLOAD):
        what = f"{USER_WORKLOAD} requires a file that describes the model"
        do = "pass the file with --model-config, in 'show', 'metrics', 'predict', 'plan', 'memory' or 'run'"
        raise UsageError(what, do=do)


def custom_workload(template: Path, own: UserModel) -> WorkloadFile:
    """Return the workload in ``template`` with the layouts of a model."""
    model = own.model
    rows = (LayoutRow(gpus=1, layers=model.layers, mbs=1, gbs=8),)
    dtypes = (Dtype.BF16, Dtype.FP8)
    table = LayoutTable(
        size=model.size,
        gpus_with=GpuKind(),
        dtypes=dtypes,
        seq_len=min(model.max_seq_len, MOST_TOKENS),
        above_largest="refuse",
        batch_rule=BatchRule(gpus=1, gbs=8),
        notes=("the layout is a starting point: 'llmb plan' finds faster ones, and 'llmb memory' checks if it fits",),
        rows=rows,
    )
    runs_on_cpu = model.other_parts is None and parameter_count(model)[0] <= MOST_ON_CPU
    on_cpu = table.model_copy(update={"gpu_types": ("cpu",), "gpus_with": None, "dtypes": (Dtype.FP32, *dtypes)})
    workload = read_file(template, WorkloadFile)
    return workload.model_copy(update={"layouts": (table, on_cpu) if runs_on_cpu else (table,)})
