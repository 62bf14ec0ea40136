# SPDX-License-Identifier: Apache-2.0
"""Preparation as jobs of a scheduler: one for the dataset and one for the checkpoint, each on one node."""

import itertools
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import CPU, Request, find_workload, resolve
from llmb.errors import EnvironmentProblem, InfrastructureError, UsageError
from llmb.jobs.assemble import mounted_folders
from llmb.jobs.job import LIVE, Job
from llmb.jobs.order import Prepared, Queued
from llmb.jobs.preparation import PROGRAM, Part, Preparation, preparations, write_preparation
from llmb.jobs.rebuild import row_of_preparation
from llmb.jobs.refresh import refresh
from llmb.jobs.store import Filter, Store
from llmb.jobs.submit import hand_over, new_key, submission_lock
from llmb.jobspec.arguments import PYTHON, Word
from llmb.jobspec.options import JobOptions
from llmb.jobspec.placement import Placement
from llmb.jobspec.spec import JobSpec, write_spec
from llmb.jobspec.variables import VariableLayer, layered
from llmb.options.option import Option, limit_problems
from llmb.prepared.folders import prepared_folders
from llmb.runs.claim import stamped_folder
from llmb.runs.folder import RunFolder, cannot_write, write_atomically
from llmb.schedulers.lookup import QUEUE, find_scheduler
from llmb.schedulers.port import Scheduler
from llmb.site.site import Site

TIME_LIMIT_MIN = 55
"""Of the reference documents."""
CPUS = 8
"""Preparation runs in several processes; a scheduler's default is often one core."""
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
"""They may hold a password, and a node may reach the hub by one alone."""
PARTS: tuple[Part, ...] = ("dataset", "checkpoint")
ASK_S = 10.0
_option = partial(Option, panel="Preparation", basic=True)


class PrepareChoices(Record):
    """The options of ``llmb prepare submit`` beside those of the scheduler."""

    skip_dataset: Annotated[bool, _option(help="Submit no job for the dataset.")] = False
    skip_checkpoint: Annotated[bool, _option(help="Submit no job for the checkpoint.")] = False
    gpu_type: Annotated[
        str | None,
        _option(help="GPU type that will train: its layout determines the sequence length. Default: all of them."),
    ] = None
    seq_len: Annotated[
        int | None,
        _option(help="Sequence length to pack to. Default: of the GPU type, or of all.", minimum=2, metavar="TOKENS"),
    ] = None
    dataset_source: Annotated[
        str | None, _option(help="Folder or file with the dataset, in place of the hub.", folder=True)
    ] = None
    checkpoint_source: Annotated[
        str | None, _option(help="Folder of the Hugging Face model, in place of the hub.", folder=True)
    ] = None
    tokenizer: Annotated[
        str | None, _option(help="tokenizer.json or its folder, in place of the model's.", folder=True)
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationOrder:
    """A job that can be queued: everything is decided except its folder."""

    preparation: Preparation
    arguments: tuple[str, ...]
    """Of ``llmb prepare``."""
    sources: tuple[str, ...]
    """Folders that it reads."""
    options: JobOptions
    site: Site

    @property
    def scheduler(self) -> Scheduler:
        return find_scheduler(QUEUE)

    def spec(self, folder: RunFolder) -> JobSpec:
        """Raises UsageError if the job is not possible."""
        site, what, config = self.site, self.preparation, self.site.config
        own = {"LLMB_INSTALL": str(site.install), "PYTHONUNBUFFERED": "1"}
        given = [
            VariableLayer("cluster_config.yaml", config.environment),
            VariableLayer("cluster_config.yaml, workload", config.environment_of(what.workload)),
            VariableLayer("--env", self.options.variables),
            VariableLayer("prepare", own),
        ]
        work: tuple[Word, ...] = (PYTHON, "-P", "-m", "llmb.cli.main", "prepare", what.part, *self.arguments)
        spec = JobSpec(
            scheduler=self.scheduler.name,
            program=PROGRAM,
            title=f"the {what.part} of {what.workload} {what.size}, prepared by llmb",
            name=folder.name,
            placement=Placement(1, max(what.gpus, 1), whole_nodes=False),
            gpus=what.gpus > 0,
            time_limit_min=TIME_LIMIT_MIN,
            start="once",
            cpus=CPUS,
            variables=layered((), site.shell, given),
            secrets=(*TOKENS, *PROXIES),
            gpu_type=what.gpu_type,
            modules=config.modules,
            profiles=config.profiles,
            prolog=config.prolog,
            python=config.python or self.options.python,
            container=mounted_folders(config.container, [str(site.install), *self.sources]),
            work=work,
            log=folder.log.name,
        )
        return self.scheduler.completed(spec, self.options, site)

    def sample_folder(self) -> RunFolder:
        name = self.preparation.name
        return RunFolder(preparations(self.site.install, self.preparation.workload) / f"{name}_SECONDS" / name)

    def script(self) -> str:
        """The batch script in a folder that need not exist. Raises UsageError if the job is not possible."""
        folder = self.sample_folder()
        return self.scheduler.script(self.spec(folder), folder)


def preparation_orders(
    catalogue: Catalogue, workload: str, size: str, choices: PrepareChoices, options: JobOptions, site: Site
) -> list[PreparationOrder]:
    """The jobs that prepare what ``workload`` needs in ``size``. Raises UsageError."""
    if size not in find_workload(catalogue, workload).sources:
        what = f"{workload} {size} trains on synthetic data from random weights: there is nothing to prepare"
        raise UsageError(what, choices=_prepared_models(catalogue))
    if problems := list(limit_problems(choices)):
        raise UsageError("\n".join(problems))
    wanted = {"dataset": not choices.skip_dataset, "checkpoint": not choices.skip_checkpoint}
    if not any(wanted.values()):
        raise UsageError("neither the dataset nor the checkpoint is to be prepared", do="leave out one --skip option")
    _check_model(catalogue, workload, size, choices, site)
    gpu_type = choices.gpu_type or find_scheduler(QUEUE).defaults(site, options).gpu_type
    recipe = resolve(catalogue, Request(workload=workload, size=size, gpu_type=gpu_type))
    seq_len = choices.seq_len or (recipe.layout.seq_len if gpu_type else None)
    # The two jobs do not wait for each other: the dataset takes the tokenizer from where the checkpoint comes from.
    paths: dict[str, dict[str, str | None]] = {
        "dataset": {
            "--source": choices.dataset_source,
            "--tokenizer": choices.tokenizer or choices.checkpoint_source,
            "--seq-len": str(seq_len) if seq_len else None,
        },
        "checkpoint": {"--source": choices.checkpoint_source},
    }
    gpus = options.gpus_per_node or 0
    orders = []
    for part in PARTS:
        given = {flag: text for flag, text in paths[part].items() if text}
        preparation = Preparation(
            workload=workload, size=size, part=part, gpu_type=recipe.gpu_type if gpus else CPU, gpus=gpus
        )
        order = PreparationOrder(
            preparation=preparation,
            arguments=("-w", workload, "-s", size, *itertools.chain.from_iterable(given.items())),
            sources=tuple(text for flag, text in given.items() if flag != "--seq-len"),
            options=options,
            site=site,
        )
        orders.append(order)
    return [order for order in orders if wanted[order.preparation.part]]


def _check_model(catalogue: Catalogue, workload: str, size: str, choices: PrepareChoices, site: Site) -> None:
    """Raises UsageError if the model is neither on the hub nor given."""
    source = find_workload(catalogue, workload).sources[size]
    if source.page is not None or choices.checkpoint_source:
        return
    prepared = prepared_folders(site.install, workload).model(source.model).exists()
    if not choices.skip_checkpoint or not (choices.tokenizer or prepared):
        do = f"give --checkpoint-source; 'llmb prepare sample FOLDER -w {workload} -s {size}' makes a model"
        raise UsageError(f"the model of {workload} {size} is not on the hub", do=do)


def _prepared_models(catalogue: Catalogue) -> Iterator[str]:
    for name, workload in catalogue.workloads.items():
        yield from (f"-w {name} -s {size}" for size in workload.sources)


def submit_preparation(store: Store, order: PreparationOrder, environ: Mapping[str, str]) -> Queued:
    """Queues one job. Raises UsageError and EnvironmentProblem if it is rejected, and then nothing is left of it;
    InfrastructureError if the scheduler does not answer: the job may be queued, and the next refresh finds out.
    """
    what = order.preparation
    with submission_lock(order.site.install) as descriptor:
        folder = stamped_folder(preparations(order.site.install, what.workload), what.name)
        with _removed_if_refused(folder):
            spec = order.spec(folder)
            try:
                write_preparation(folder, what)
                write_spec(folder, spec)
                write_atomically(folder.batch_script, order.scheduler.script(spec, folder))
            except OSError as error:
                raise cannot_write(folder.path, error) from error
            row = Job(
                key=new_key(),
                scheduler=spec.scheduler,
                run_dir=str(folder.path),
                experiment=folder.name,
                submitted_s=time.time(),
                **row_of_preparation(what),
            )
            store.add([row])
            (queued,) = hand_over(store, Prepared(spec, folder, {None: folder}), {folder: row}, environ, descriptor)
    return queued


def same_jobs(store: Store, install: Path, orders: Sequence[PreparationOrder]) -> dict[Part, Job]:
    """The jobs that prepare the same already and have not ended, by part."""
    with suppress(InfrastructureError, EnvironmentProblem):
        refresh(store, install, ASK_S)
    found: dict[Part, Job] = {}
    for what in (order.preparation for order in orders):
        live = store.jobs(Filter(states=LIVE, workload=what.workload))
        same = [job for job in live if (job.size, job.prepares) == (what.size, what.part)]
        if same:
            found[what.part] = same[-1]
    return found


@contextmanager
def _removed_if_refused(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except (UsageError, EnvironmentProblem):
        shutil.rmtree(folder.path.parent, ignore_errors=True)
        raise
