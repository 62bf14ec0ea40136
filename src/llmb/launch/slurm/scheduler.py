# SPDX-License-Identifier: Apache-2.0
"""Slurm as a scheduler, and the installer's questions about it."""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from llmb.base.errors import InfrastructureError
from llmb.base.options import Option, build
from llmb.base.secrets import without_secrets
from llmb.base.shown_text import counted
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.jobspec.spec import JobSpec
from llmb.launch.scheduler_port import (
    NONE,
    Choice,
    Defaults,
    FaultPattern,
    FaultTable,
    InstallerPart,
    JobAnswers,
    JobHandle,
    JobState,
    NodeState,
    Offer,
    Overlay,
    Partition,
    Scheduler,
    SchedulerQuestion,
    SchedulerSetup,
    Submission,
)
from llmb.launch.site.site import Site
from llmb.launch.slurm import client
from llmb.launch.slurm.job_state import WORDS, SlurmJob, with_meaning
from llmb.launch.slurm.launch import call_launch, completed_launch, launch_text, launched_id
from llmb.launch.slurm.offer import (
    compress,
    expand,
    gpu_type_within,
    nodelist_warnings,
    read_nodes,
    read_setup,
    site_partition,
    slurm_offer,
)
from llmb.launch.slurm.request import (
    ADDITIONAL,
    FLAG_NAMES,
    SlurmChoices,
    completed_spec,
    shell_flags,
    shell_gpus_per_node,
    slurm_options,
    variable_of,
)
from llmb.launch.slurm.script import batch_script
from llmb.launch.slurm.settings import (
    GPU_FLAGS,
    NO_FLAG,
    GpuRequest,
    SlurmSettings,
    parse_additional,
    partition_names,
    settings_of,
)
from llmb.runs.folder import RunFolder
from llmb.runs.record import BegunJob, SubmittedJob, now

_cluster = partial(Option, panel="Cluster")


class SlurmAnswers(Record):
    """The installer's answers that only Slurm needs."""

    account: Annotated[
        str | None, _cluster(help="Slurm account, or none for Slurm's default.", set_by=("SBATCH_ACCOUNT",))
    ] = None
    gpu_partition: Annotated[str | None, _cluster(help="Partition for training.", set_by=("SBATCH_PARTITION",))] = None
    cpu_partition: Annotated[
        str | None, _cluster(help="Partition for jobs without GPUs, or none to use the training partition.")
    ] = None
    gpu_request: Annotated[
        GpuRequest | None, _cluster(help="Request for GPUs. Default: gpus-per-node if Slurm manages GPUs, else none.")
    ] = None
    gres_type: Annotated[
        str | None, _cluster(help="GPU type in Slurm's requests for GPUs, or none. Default: none.", metavar="TYPE")
    ] = None


class SlurmQuestion(SchedulerQuestion):
    answers: SlurmAnswers

    @property
    def partition(self) -> Partition | None:
        return training_partition(self.answers, self.offer)

    def partitions(self) -> list[Choice]:
        return [Choice(item.name, _partition_text(item)) for item in self.offer.partitions]


class Account(SlurmQuestion):
    name, text = "account", "Slurm account"

    def choices(self) -> list[Choice]:
        names = self.offer.accounts
        return [] if names is None else [*map(Choice, names), Choice(NONE, "Slurm's own default")]

    def assumed(self) -> str | None:
        return self.offer.default_account or (NONE if not self.offer.accounts else None)


class GpuPartition(SlurmQuestion):
    name, text = "gpu_partition", "Partition of the nodes that train"
    several = True

    def choices(self) -> list[Choice]:
        return self.partitions()

    def assumed(self) -> str | None:
        """Return the only partition with GPUs or, if none has any, the only partition; otherwise None."""
        partitions = self.offer.partitions
        with_gpus = [item for item in partitions if item.gpus_per_node] or list(partitions)
        return with_gpus[0].name if len(with_gpus) == 1 else None


class CpuPartition(SlurmQuestion):
    name, text = "cpu_partition", "Partition for jobs that need no GPU"
    several = True

    def choices(self) -> list[Choice]:
        return [*self.partitions(), Choice(NONE, f"the partition for training, {self.answers.gpu_partition}")]

    def assumed(self) -> str:
        return NONE


class GpuRequests(SlurmQuestion):
    name, text = "gpu_request", "How jobs ask Slurm for GPUs"
    after = "gpus_per_node"

    def choices(self) -> list[Choice]:
        count = (self.partition and self.partition.gpus_per_node) or "N"
        return [
            Choice("gpus-per-node", f"--gpus-per-node={count}"),
            Choice("gres", f"--gres=gpu:{count}"),
            Choice(NONE, "no flag: Slurm does not count GPUs here; jobs use whole nodes"),
        ]

    def assumed(self) -> str:
        return "gpus-per-node" if self.partition and self.partition.gpus_per_node else NONE

    def check(self, value: str) -> str | None:
        if value != NONE and self.partition and not self.partition.gpus_per_node:
            return f"nodes in {self.partition.name} have no generic resource 'gpu', so Slurm would reject every job"
        return None


def training_partition(answers: SlurmAnswers, offer: Offer) -> Partition | None:
    """Return the training partition, or the first of several; None if the scheduler does not offer it."""
    return offer.partition(partition_names(answers.gpu_partition)[0])


def _partition_text(item: Partition) -> str:
    gpus = f"{item.gpus_per_node} x {item.gres_type or 'GPU'} each" if item.gpus_per_node else "no GPUs counted"
    nodes = counted(item.nodes, "node")
    return ", ".join(filter(None, (nodes, gpus, item.architecture, "the default" if item.is_default else None)))


class SlurmInstaller(InstallerPart):
    """Slurm's part of an installation."""

    answers = SlurmAnswers
    questions = (Account, GpuPartition, CpuPartition, GpuRequests)
    runtimes = (Choice("pyxis", "Slurm's plugin, with Enroot"), Choice("apptainer"))
    comments = MappingProxyType(
        {
            "partition": "of jobs that train",
            "cpu_partition": "of jobs without GPUs",
            "gpu_request": "gpus-per-node, gres, or none",
            "gres_type": "type in --gres=gpu:TYPE:N",
        }
    )

    def training_nodes(self, answers: SlurmAnswers, offer: Offer) -> Partition | None:
        return training_partition(answers, offer)

    def section(self, answers: SlurmAnswers, gpus_per_node: int | None) -> dict[str, Any]:
        values = {
            "account": answers.account,
            "partition": answers.gpu_partition,
            "cpu_partition": answers.cpu_partition,
            "gpus_per_node": gpus_per_node,
            "gres_type": answers.gres_type,
        }
        values_given = {key: value for key, value in values.items() if value not in (None, NONE)}
        # 'none' is a valid value only for gpu_request.
        return {**values_given, "gpu_request": answers.gpu_request} if answers.gpu_request else values_given

    def answers_in(self, section: Mapping[str, Any]) -> dict[str, Any]:
        same = ("account", "cpu_partition", "gpus_per_node", "gres_type")
        values = {name: section[name] for name in same if section.get(name) is not None}
        if section.get("partition"):
            values |= {"gpu_partition": section["partition"], "gpu_request": section["gpu_request"]}
        return values


SETTING_FLAGS = ("account", "partition")
"""Flags with settings of their own in the section ``slurm``."""
OF_SRUN = ("SRUN_", "SLURM_EXPORT_ENV")
"""Prefixes of variables that change srun's options; SLURM_EXPORT_ENV, for one, selects the variables of a step."""


def _of_shell(environ: Mapping[str, str]) -> Iterator[Overlay]:
    names = {flag: name for name, flag in FLAG_NAMES.items()}
    for flag, value in shell_flags(environ).items():
        if flag in GPU_FLAGS:
            continue
        variable = str(variable_of(names[flag], environ))
        yield Overlay(key=_key(flag), value=value, source="shell", place=variable)
    counted = variable_of("gpus_per_node", environ)
    if all(shell_flags(environ).get(flag) == NO_FLAG for flag in GPU_FLAGS):
        yield Overlay(key="slurm.gpu_request", value="none", source="shell", place=str(counted))
    elif count := shell_gpus_per_node(environ):
        yield Overlay(key="slurm.gpus_per_node", value=count, source="shell", place=str(counted))
    for flag, value in parse_additional(environ.get(ADDITIONAL, "")).items():
        yield Overlay(key=_key(flag), value=True if value is None else value, source="shell", place=ADDITIONAL)


def _key(flag: str) -> str:
    return f"slurm.{flag}" if flag in SETTING_FLAGS else f"slurm.flags.{flag}"


CAUSES = {"TERM": "Slurm (TERM: cancelled, preempted, or out of time)", "USR1": "its approaching time limit"}
FAULTS = Path(__file__).with_name("faults.yaml")


class SlurmScheduler(SlurmInstaller, Scheduler):
    """Slurm, behind the interface that jobs, campaigns and commands use."""

    name = "slurm"
    title = "Slurm"
    settings = SlurmSettings
    gpus_key, time_limit_key = "slurm.gpus_per_node", "slurm.flags.time"
    choices = SlurmChoices
    words = WORDS

    def read_options(self, values: Mapping[str, Any], environ: Mapping[str, str], python: str) -> JobOptions:
        return slurm_options(build(SlurmChoices, values), environ, python)

    def defaults(self, site: Site, options: JobOptions, gpu_type: str | None = None) -> Defaults:
        settings, partition = settings_of(site), options.flags.get("partition")
        gpu = gpu_type_within(settings, partition, gpu_type, site.config.gpu_type)
        part = settings.within(partition := partition or site_partition(settings, gpu))
        return Defaults(gpu, part.gpus_per_node, part.start, part.retries, partition)

    def overlays(self, site: Site, partition: str | None) -> Sequence[Overlay]:
        settings, overlays = settings_of(site), list(_of_shell(site.shell))
        if partition:
            overlays.append(Overlay(key="slurm.partition", value=partition, source="option", place="--partition"))
        shell = shell_flags(site.shell).get("partition")
        chosen = partition_names(partition or shell or site_partition(settings, site.config.gpu_type))
        name = next((name for name in chosen if name in settings.partitions), None)
        part = settings.partitions[name].model_dump(exclude_none=True) if name else {}
        for field, value in part.items():
            key, place = field if field == "gpu_type" else f"slurm.{field}", f"slurm.partitions.{name}.{field}"
            overlays.append(Overlay(key=key, value=value, source="setting", place=place))
        return overlays

    def completed(self, spec: JobSpec, options: JobOptions, site: Site) -> JobSpec:
        if spec.launch:
            return completed_launch(spec, spec.launch, options, settings_of(site))
        return completed_spec(spec, options, settings_of(site))

    def warnings(self, spec: JobSpec) -> Sequence[str]:
        return tuple(nodelist_warnings(spec.flags.get("nodelist"), spec.placement.nodes))

    def script(self, spec: JobSpec, folder: RunFolder) -> str:
        return launch_text(spec, spec.launch, folder) if spec.launch else batch_script(spec, folder)

    def handing_over(self, base: RunFolder, spec: JobSpec) -> tuple[str, ...]:
        script = str(base.batch_script)
        return ("bash", script) if spec.launch else ("sbatch", "--parsable", script)

    def submit(self, job: Submission) -> SubmittedJob:
        spec = job.spec
        if spec.launch:
            return SubmittedJob(scheduler=self.name, job_id=call_launch(job), submitted_at=now())
        arguments = [f"--exclude={spec.excluded_nodes}"] if job.again and spec.excluded_nodes else []
        job_id, cluster = client.submit(job.folder.batch_script, job.environ, job.held, arguments, spec.secrets)
        return SubmittedJob(scheduler=self.name, job_id=job_id, cluster=cluster, submitted_at=now())

    def states(self, jobs: Sequence[JobHandle], time_out_s: float) -> JobAnswers:
        """Query the controller for the states of jobs. For live jobs that it no longer has, query accounting."""
        ids = list(dict.fromkeys(job.job_id for job in jobs if job.job_id))
        answers = client.controller_states(ids, time_out_s) if ids else {}
        states = {
            job.key: with_meaning(answers[job.job_id])
            for job in jobs
            if job.job_id in answers and is_same(job, answers[job.job_id])
        }
        forgotten = [job for job in jobs if job.live and job.job_id and job.key not in states]
        if not forgotten:
            return JobAnswers(states)
        try:
            accounts = client.accounted_states([str(job.job_id) for job in forgotten], time_out_s)
        except InfrastructureError as error:
            unheard = {job.key: JobState(job_id=str(job.job_id), end_pending=True) for job in forgotten}
            return JobAnswers({**states, **unheard}, [error.what])
        return JobAnswers({**states, **{job.key: accounted(job, accounts) for job in forgotten}})

    def find(self, jobs: Sequence[JobHandle], since_s: float, claimed: set[str], time_out_s: float) -> dict[str, str]:
        answers = [*client.user_jobs(time_out_s), *client.user_accounts(since_s, time_out_s)]
        used, ids = set(claimed), dict[str, str]()
        for job in jobs:
            job_id = launched_id(job.folder) or find_submission(job, answers, used)
            if job_id:
                used.add(job_id)
                ids[job.key] = job_id
        return ids

    def cancel(self, jobs: Sequence[JobHandle]) -> None:
        client.cancel_jobs([job.job_id for job in jobs if job.job_id])

    def current_job(self, environ: Mapping[str, str]) -> BegunJob:
        return BegunJob(
            scheduler=self.name,
            job_id=environ["SLURM_JOB_ID"],
            nodes=environ["SLURM_JOB_NODELIST"],
            restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        )

    def host_names(self, nodes: str | None) -> list[str]:
        return expand(nodes)

    def host_list(self, names: Iterable[str]) -> str:
        return compress(names)

    def nodes(self, listed: str | None, partition: str | None, time_out_s: float) -> dict[str, NodeState]:
        return read_nodes(listed, partition, time_out_s)

    def cause(self, signal: str) -> str:
        return CAUSES.get(signal, signal)

    def offer(self) -> Offer:
        return slurm_offer()

    def fault_patterns(self) -> Sequence[FaultPattern]:
        return read_file(FAULTS, FaultTable).faults

    def is_installed(self, environ: Mapping[str, str]) -> bool:
        return shutil.which("sbatch", path=environ.get("PATH")) is not None

    def options_here(self, environ: Mapping[str, str]) -> JobOptions:
        partition, gpus = environ.get("SLURM_JOB_PARTITION"), environ.get("SLURM_GPUS_ON_NODE", "")
        return JobOptions(
            flags={"partition": partition} if partition else {},
            nodes=len(expand(environ.get("SLURM_JOB_NODELIST"))) or None,
            gpus_per_node=int(gpus) if gpus.isdecimal() else None,
        )

    def variables_here(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the current job's environment. Unless they are set, node name and number of cores are the first
        node's, because ``salloc`` may run elsewhere."""
        node = {"SLURMD_NODENAME": expand(environ["SLURM_JOB_NODELIST"])[0]}
        if cores := environ.get("SLURM_JOB_CPUS_PER_NODE"):
            node["SLURM_CPUS_ON_NODE"] = re.split(r"\D", cores)[0]  # such as 64(x2),32
        variables = {name: text for name, text in without_secrets(environ).items() if not name.startswith(OF_SRUN)}
        return node | variables

    def setup(self, node: str, time_out_s: float) -> SchedulerSetup:
        return read_setup(node, time_out_s)


def accounted(job: JobHandle, accounts: Mapping[str, SlurmJob]) -> JobState:
    """Return accounting's report on a job that the controller no longer has. The job has ended, so accounting lags
    behind if it reports the job as live."""
    answer = accounts.get(str(job.job_id))
    if answer is None or not is_same(job, answer):
        return JobState(job_id=str(job.job_id))
    state = with_meaning(answer)
    return state if state.ended else JobState(job_id=state.job_id, restarts=state.restarts, end_pending=True)


def is_same(job: JobHandle, answer: SlurmJob) -> bool:
    """Return whether Slurm's answer is about ``job``: ids repeat once a controller has lost its state.

    Every job of llmb has its own batch script, which is submitted by its full path. Jobs that a program's own script
    queued are not checked.
    """
    is_script = answer.command is None or answer.command.endswith(str(job.folder.batch_script))
    return is_script or job.folder.launch_output.exists()


def find_submission(job: JobHandle, answers: Sequence[SlurmJob], claimed: set[str]) -> str | None:
    """Return the id of the Slurm job that runs the batch script of ``job`` and belongs to no other job. A job that a
    program's own script queued is not found here: it runs another script."""
    script = str(job.folder.batch_script)
    for state in answers:
        if state.command and state.command.endswith(script) and state.job_id not in claimed:
            return state.job_id
    return None
