# SPDX-License-Identifier: Apache-2.0
"""Prepares data in jobs of a scheduler: one for the dataset and one for the checkpoint, each on one node."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

from llmb.base.errors import EnvironmentProblem, InfrastructureError, UsageError
from llmb.base.options import Option, limit_problems
from llmb.base.trust import WORKLOADS
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.published import Source
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import CPU, Request, resolve, source_of
from llmb.jobs.job import LIVE, Job
from llmb.jobs.refresh import refresh
from llmb.jobs.store import Filter, Store
from llmb.jobs.task import PREPARATIONS, TaskOrder, TaskRecord
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.jobspec.spec import PYTHON, Placement
from llmb.launch.scheduler_lookup import scheduler_of
from llmb.launch.site.site import Site
from llmb.runs.checkpoints.prepared_data import prepared_folders

TIME_LIMIT_MIN = 55
"""Time limit of a job in minutes, from the reference documents."""
CPUS = 8
"""Cores of a job, which runs several processes."""
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
"""Proxy variables, which may contain a password."""
ASK_S = 10.0
_option = partial(Option, panel="Preparation", basic=True)


class PrepareChoices(Record):
    """The options of ``llmb prepare submit`` besides the workload, the size and the scheduler's options."""

    skip_dataset: Annotated[bool, _option(help="Do not submit a job for the dataset.")] = False
    skip_checkpoint: Annotated[bool, _option(help="Do not submit a job for the checkpoint.")] = False
    gpu_type: Annotated[
        str | None, _option(help="GPU type to pack for. Default: that of cluster_config.yaml, else all GPU types.")
    ] = None
    seq_len: Annotated[
        int | None,
        _option(help="Tokens per pack. Default: as in the recipe for --gpu-type.", minimum=2, metavar="TOKENS"),
    ] = None
    dataset_source: Annotated[
        str | None, _option(help="Folder or file with the dataset. Default: the Hugging Face hub.", folder=True)
    ] = None
    checkpoint_source: Annotated[
        str | None, _option(help="Folder with the Hugging Face model. Default: downloaded from the hub.", folder=True)
    ] = None
    tokenizer: Annotated[
        str | None,
        _option(
            help="tokenizer.json, or its folder. Default: from --checkpoint-source, else the model's.", folder=True
        ),
    ] = None


def preparation_orders(
    catalogue: Catalogue, workload: str, size: str, choices: PrepareChoices, options: JobOptions, site: Site
) -> list[TaskOrder]:
    """Return the jobs that prepare dataset and checkpoint, unless skipped; raise UsageError for invalid choices."""
    source = source_of(catalogue, workload, size)
    if problems := list(limit_problems(choices)):
        raise UsageError("\n".join(problems))
    if choices.skip_dataset and choices.skip_checkpoint:
        do = "omit --skip-dataset or --skip-checkpoint, or unset SKIP_DATASET_DOWNLOAD or SKIP_IMPORT_CHECKPOINT"
        raise UsageError("both the dataset and the checkpoint are skipped", do=do)
    if source.page is None:
        _check_given(source, workload, size, choices, site)
    gpu_type = choices.gpu_type or scheduler_of(site).defaults(site, options).gpu_type
    recipe = resolve(catalogue, Request(workload=workload, size=size, gpu_type=gpu_type))
    seq_len = choices.seq_len or (recipe.layout.seq_len if gpu_type else None)
    # The two jobs do not wait for each other: the dataset's takes the tokenizer from the source of the checkpoint.
    tokenizer = choices.tokenizer or choices.checkpoint_source
    paths = {
        "dataset": {"--source": choices.dataset_source, "--tokenizer": tokenizer},
        "checkpoint": {"--source": choices.checkpoint_source},
    }
    skipped = {"dataset": choices.skip_dataset, "checkpoint": choices.skip_checkpoint}
    lengths = {"dataset": ("--seq-len", str(seq_len))} if seq_len else {}
    gpus = options.gpus_per_node or 0
    return [
        _order(
            TaskRecord(
                kind="preparation",
                subject=part,
                workload=workload,
                size=size,
                gpus=gpus > 0,
                gpu_type=recipe.gpu_type if gpus else CPU,
                scale=max(gpus, 1),
            ),
            {flag: path for flag, path in source_path.items() if path},
            lengths.get(part, ()),
            options,
            site,
        )
        for part, source_path in paths.items()
        if not skipped[part]
    ]


def _order(
    task: TaskRecord, sources: Mapping[str, str], more: tuple[str, ...], options: JobOptions, site: Site
) -> TaskOrder:
    model = ("-w", task.workload, "-s", task.size)
    arguments = (*model, *itertools.chain.from_iterable(sources.items()), *more)
    return TaskOrder(
        task=task,
        name=f"prepare_{task.subject}_{task.size}",
        parent=site.install / WORKLOADS / task.workload / PREPARATIONS,
        title=f"the {task.subject} of {task.workload} {task.size}, prepared by llmb",
        placement=Placement(1, task.scale, whole_nodes=False),
        time_limit_min=TIME_LIMIT_MIN,
        work=(PYTHON, "-P", "-m", "llmb.cli.main", "prepare", task.subject, *arguments),
        cpus=CPUS,
        secrets=(*TOKENS, *PROXIES),
        sources=tuple(sources.values()),
        options=options,
        site=site,
    )


def _check_given(source: Source, workload: str, size: str, choices: PrepareChoices, site: Site) -> None:
    prepared = prepared_folders(site.install, workload).model(source.model).exists()
    is_specified = choices.skip_checkpoint and (choices.tokenizer or prepared)
    if not choices.checkpoint_source and not is_specified:
        do = f"pass --checkpoint-source; 'llmb prepare sample FOLDER -w {workload} -s {size}' creates FOLDER/model"
        raise UsageError(f"the model of {workload} {size} is not on the hub", do=do)


def same_jobs(store: Store, install: Path, orders: Sequence[TaskOrder]) -> dict[str, Job]:
    """Return the unfinished jobs of the same preparations, by subject, after an update of the history if possible."""
    with suppress(InfrastructureError, EnvironmentProblem):
        refresh(store, install, ASK_S)
    live = store.jobs(Filter(states=LIVE, kind="preparation"))
    by_subject = {(job.workload, job.size, job.subject): job for job in live}
    keys = [(order.task.workload, order.task.size, order.task.subject) for order in orders]
    return {key[-1]: by_subject[key] for key in keys if key in by_subject}
