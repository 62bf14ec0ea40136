# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor``: checks nodes or, with ``--against``, compares their settings with those recorded in a run."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from llmb.base.errors import EnvironmentProblem, RunFailed, UsageError, UserInterrupt
from llmb.base.options import options_of
from llmb.catalogue.catalogue import Catalogue
from llmb.cli.common import Json, Junit, is_verbose
from llmb.cli.progress import CountProgress, PhaseProgress
from llmb.cli.root import install_here, say
from llmb.cli.shared_options import COMPLETIONS, takes
from llmb.jobs.find_runs import find_ended_runs
from llmb.jobs.history import open_history
from llmb.launch.scheduler_lookup import read_cluster_site, read_job_options, scheduler_of
from llmb.launch.scheduler_port import NodeState, Scheduler
from llmb.nodes.doctor.check_nodes import CheckTerms, NodesCheck
from llmb.nodes.doctor.check_records import CheckOptions, NodeReport
from llmb.nodes.doctor.checked_nodes import (
    CheckFolder,
    NodesRequest,
    NodesResult,
    last_check,
    listed_in,
    listed_names,
    new_check,
    stored,
)
from llmb.nodes.doctor.facts import check_gpu_type
from llmb.nodes.doctor.node import DISK_BYTES, check_node, check_request, settings_here
from llmb.nodes.doctor.rules import AREAS, parse_checks
from llmb.readers.samples.host import host_name
from llmb.readers.samples.node_settings import NodesSettings, together
from llmb.reports.doctor_report import (
    DriftReport,
    HostList,
    doctor_document,
    drift_tables,
    node_tables,
    nodes_document,
    nodes_tables,
)
from llmb.reports.junit import node_cases, write_junit
from llmb.reports.output import print_output
from llmb.runs.conditions import find_drift, settings_of_run
from llmb.runs.record import RunRecord, now

ASK_S = 60.0
MIB = 2**20
_several = partial(typer.Option, rich_help_panel="Several nodes")
_settings = partial(typer.Option, rich_help_panel="Settings of nodes, instead of checks")
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class Checked:
    """Options for the checks of each node."""

    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES", help=f"Areas or checks to run, separated by commas. Repeatable. Areas: {', '.join(AREAS)}."
        ),
    ] = None
    gpu_type: Annotated[
        str | None,
        typer.Option(
            help="GPU type that each node should have. Default: from cluster_config.yaml, else any.",
            autocompletion=COMPLETIONS["gpu_type"],
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs each node should have. Default: from cluster_config.yaml, else the GPU type's."),
    ] = None
    disk_size: Annotated[
        int, typer.Option(metavar="MIB", min=4, help="Maximum size of the test file on each file system, in MiB.")
    ] = DISK_BYTES // MIB
    no_disk: Annotated[bool, typer.Option("--no-disk", help="Do not write test files to measure file systems.")] = False

    def options(self) -> CheckOptions:
        """Return the options of the checks; raise UsageError if they are invalid or cannot be combined."""
        if self.no_disk and self.disk_size != DISK_BYTES // MIB:
            raise UsageError("--no-disk and --disk-size cannot be combined", do="pass only one")
        size = 0 if self.no_disk else self.disk_size * MIB
        return CheckOptions(gpu_type=self.gpu_type, gpus=self.gpus, disk_bytes=size, only=parse_checks(self.only or ()))


@dataclass(frozen=True, slots=True)
class SeveralNodes:
    """Options for the nodes of a cluster to check, and for the jobs that check them."""

    nodes: Annotated[
        str | None, _several(metavar="LIST", help="Check these nodes of the cluster, such as node[1-4,7].")
    ] = None
    nodelist_file: Annotated[Path | None, _several(metavar="FILE", help="File of nodes to check, one per line.")] = None
    partition: Annotated[
        str | None,
        _several(
            *("-p", "--partition"),
            help="Partition whose nodes are checked; with a list of nodes, only the partition for the jobs.",
        ),
    ] = None
    every: Annotated[bool, _several("--all", help="Check all usable nodes of the cluster.")] = False
    account: Annotated[
        str | None, _several("-A", "--account", help="Slurm account. Default: from the settings, else Slurm's default.")
    ] = None
    slurm_arg: Annotated[
        list[str] | None,
        _several(
            metavar="KEY[=VALUE]",
            help="Another sbatch flag, such as reservation=maint; 'KEY=' removes a flag. Repeatable.",
        ),
    ] = None
    time_limit: Annotated[int, _several(metavar="MINUTES", min=1, help="Time limit per node, in minutes.")] = 10
    max_wait: Annotated[float, _several(metavar="MINUTES", min=0, help="Minutes to wait for busy nodes.")] = 15.0
    last: Annotated[bool, _several("--last", help="Print the last check of several nodes again.")] = False

    @property
    def any(self) -> bool:
        return self.every or any(item is not None for item in (self.nodes, self.nodelist_file, self.partition))

    @property
    def listed(self) -> str | None:
        """Return the list of nodes, if any; raise UsageError for conflicting options or an unreadable file."""
        if sum((self.nodes is not None, self.nodelist_file is not None, self.every)) > 1:
            raise UsageError("--nodes, --nodelist-file and --all cannot be combined", do="pass only one")
        return listed_in(self.nodelist_file) if self.nodelist_file else self.nodes


@dataclass(frozen=True, slots=True)
class ReportOptions:
    junit: Junit = None
    json: Json = False


AgainstRun = Annotated[
    str | None,
    _settings(metavar="RUN", help="List settings that changed since this run, on this machine or selected nodes."),
]
FailOnDrift = Annotated[
    bool, _settings("--fail-on-drift", help="With --against: exit with 4 on an important change or unreadable node.")
]


@app.command()
@takes(Checked, SeveralNodes, ReportOptions)
def doctor(
    checked: Checked,
    several: SeveralNodes,
    output: ReportOptions,
    ctx: typer.Context,
    against: AgainstRun = None,
    fail_on_drift: FailOnDrift = False,
) -> None:
    """Check whether this node, or each node of a list, is fit to train, with advice for each problem.

    The checks cover GPUs, CPUs, memory, kernel, limits, network, scheduler, containers, file systems and the clock, and
    whether Python, torch, CUDA, driver and NCCL fit together. Each check passes, warns or fails, or is listed as not
    checked, with the reason. Nothing is changed, except that a file is written and removed on each file system.

    A list of nodes is checked through the scheduler, by an independent job for each node. A node that is down, does not
    answer or dies is reported as unfit, with the reason. Nodes that differ from the majority are listed. The result is
    stored, and `llmb submit --exclude unfit` excludes the unfit nodes.

    With --against, nothing is checked. Instead, settings that may affect the speed of a step, such as driver, firmware,
    sysctl, links and NCCL's variables, are compared with those recorded in a run.

    Exit codes: 0 every check passes or warns, 4 a check fails.

    Examples:

    - `llmb doctor`

    - `llmb doctor --gpu-type h100 --gpus 8`

    - `llmb doctor --only disk --disk-size 4096 --json`

    - `llmb doctor --nodes node[1-64] --only gpu,network`

    - `llmb doctor --partition batch --max-wait 5 --junit nodes.xml`

    - `llmb doctor --last --nodes node7`

    - `llmb doctor --against latest`

    - `llmb doctor --partition batch --against fast --fail-on-drift`
    """
    asked, install = checked.options(), install_here()
    if against is not None:
        without: dict[str, object] = {"--only": asked.only, "--gpu-type": asked.gpu_type, "--gpus": asked.gpus}
        without |= {"--no-disk": checked.no_disk, "--last": several.last, "--junit": output.junit}
        if given := ", ".join(name for name, value in without.items() if value):
            raise UsageError(f"--against cannot be combined with {given}", do=f"omit --against, or {given}")
        compare_settings(install, against, several, fail_on_drift=fail_on_drift, json=output.json)
    elif fail_on_drift:
        raise UsageError("--fail-on-drift requires --against", do="add --against, or omit --fail-on-drift")
    elif several.last:
        show_last(install, several, output)
    elif several.any:
        found = ask_nodes(install, several, NodesRequest(started_at=now(), nodes=(), **dict(asked)))
        _print(found.result, found.folder, found.scheduler, output)  # also if it was interrupted
        found.raise_if_interrupted("'llmb doctor --last' shows the result again")
        raise_unless_fit(found.result.reports, found.scheduler)
    else:
        _check_here(install, asked, output, folded=not is_verbose(ctx))


def _check_here(install: Path, asked: CheckOptions, output: ReportOptions, *, folded: bool) -> None:
    request = check_request(install, asked, os.environ)
    try:
        with PhaseProgress("checking") as progress:
            report = check_node(request, say=progress.phase)
    except KeyboardInterrupt as error:
        raise UserInterrupt("interrupted; nothing was changed") from error
    write_junit(output.junit, "doctor", lambda: node_cases([report]))
    print_output(doctor_document([report]) if output.json else node_tables(report, folded=folded))
    raise_unless_fit([report], request.scheduler)


class NodeResults(NamedTuple):
    """The results of jobs on several nodes; ``complete`` is False if the user interrupted the jobs."""

    result: NodesResult
    folder: CheckFolder
    scheduler: Scheduler
    complete: bool

    def raise_if_interrupted(self, do: str) -> None:
        """Raise UserInterrupt unless the results are complete."""
        if not self.complete:
            count, whole = len(self.result.unchecked), len(self.result.reports)
            raise UserInterrupt(f"interrupted; {count} of {whole} nodes were not checked", do=do)


def ask_nodes(install: Path, several: SeveralNodes, request: NodesRequest) -> NodeResults:
    """Run a job on each usable node; return the results of all nodes when the jobs have ended or are interrupted."""
    catalogue = Catalogue()
    site = read_cluster_site(catalogue, install, os.environ)
    scheduler = scheduler_of(site)
    check_gpu_type(catalogue, request.gpu_type)
    arguments = tuple(several.slurm_arg or ())
    values = {"account": several.account, "partition": several.partition, "slurm_arg": arguments}
    if "time_limit" in options_of(scheduler.choices):
        values["time_limit"] = str(several.time_limit)
    options = read_job_options(site, values, os.environ, sys.executable)
    states = _states(scheduler, several)
    folder = new_check(install, request.model_copy(update={"nodes": tuple(states)}))
    nodes = "1 node" if len(states) == 1 else f"{len(states)} nodes"
    doing = "reading settings of" if request.settings else "checking"
    say(f"{doing} {nodes} ({folder.path}); Ctrl-C keeps the reports so far, and cancels the rest")
    with open_history(install, say) as store, CountProgress() as progress:
        check = NodesCheck(
            store=store,
            terms=CheckTerms(site, options, several.time_limit),
            folder=folder,
            states=states,
            max_wait_s=several.max_wait * 60,
            environ=os.environ,
            on_progress=lambda what, done, total: progress.count(f"nodes {what}", done, total),
            say=say,
        )
        complete = check.run()
    return NodeResults(check.result(request.started_at), folder, scheduler, complete)


def show_last(install: Path, several: SeveralNodes, output: ReportOptions) -> None:
    """Print the last check; raise UsageError if there is none, EnvironmentProblem if it cannot be read, RunFailed if a
    node failed it."""
    if several.partition or several.every:
        raise UsageError("--last cannot be combined with --partition or --all", do="omit them, or pass --nodes LIST")
    folder, scheduler = last_check(install), scheduler_of(read_cluster_site(Catalogue(), install, os.environ))
    try:
        result = stored(folder)
    except OSError as error:
        what, do = f"the last check cannot be read: {error.strerror}", "check the nodes again, without --last"
        raise EnvironmentProblem(what, where=str(folder.path), do=do) from error
    if (listed := several.listed) is not None:
        names = listed_names(listed, listed, scheduler)
        reports = {report.node: report for report in result.reports}
        if missing := [name for name in names if name not in reports]:
            raise UsageError(f"the last check did not include {', '.join(missing)}", choices=reports)
        result = result.model_copy(update={"reports": tuple(reports[name] for name in dict.fromkeys(names))})
    _print(result, folder, scheduler, output)
    raise_unless_fit(result.reports, scheduler)


def _states(scheduler: Scheduler, several: SeveralNodes) -> dict[str, NodeState]:
    listed = several.listed
    states = scheduler.nodes(listed, several.partition if listed is None else None, ASK_S)
    if listed is not None:
        return states
    for node, state in states.items():
        if not state.usable:
            say(f"note: {node} is skipped: {state.problem}")
    usable = {node: state for node, state in states.items() if state.usable}
    if not usable:
        part = f"partition {several.partition}" if several.partition else "the cluster"
        seen = "see the reasons above and in" if states else "see"
        other = ", or pass another -p" if several.partition else ""
        raise UsageError(f"no node of {part} accepts jobs", do=f"{seen} 'sinfo -R'{other}")
    return usable


def _print(result: NodesResult, folder: CheckFolder, scheduler: Scheduler, output: ReportOptions) -> None:
    write_junit(output.junit, "doctor", lambda: node_cases(result.reports))
    form = nodes_document if output.json else nodes_tables
    print_output(form(result, str(folder.path), scheduler.host_list))


def raise_unless_fit(reports: Sequence[NodeReport], scheduler: Scheduler) -> None:
    """Raise RunFailed if a check of a node fails."""
    unfit = [report for report in reports if report.status == "fail"]
    if len(unfit) == 1:
        failed = [check.name for check in unfit[0].checks if check.status == "fail"]
        count = "1 check fails" if len(failed) == 1 else f"{len(failed)} checks fail"
        raise RunFailed(f"{unfit[0].node} is not fit: {count}: {', '.join(failed)}")
    if unfit:
        names = scheduler.host_list(report.node for report in unfit)
        raise RunFailed(f"{len(unfit)} of {len(reports)} nodes are not fit: {names}")


class ReadNodes(NamedTuple):
    """The settings of the requested nodes, and the reason for each node that was not read."""

    settings: NodesSettings
    not_read: dict[str, str]
    host_list: HostList


def read_nodes(install: Path, several: SeveralNodes) -> ReadNodes:
    """Return the settings of this node or of several."""
    if not several.any:
        return ReadNodes(together({host_name(): settings_here(install, os.environ)}), {}, ",".join)
    request = NodesRequest(started_at=now(), nodes=(), disk_bytes=0, settings=True)
    asked = ask_nodes(install, several, request)
    asked.raise_if_interrupted("run it again; nothing was saved")
    fit = asked.result.fit
    problems = {one.node: str(one.checks[0].value) for one in asked.result.reports if one.node not in fit}
    read = {node: asked.folder.read_settings(node) for node in fit}
    return ReadNodes(together(read), problems, asked.scheduler.host_list)


def compare_settings(install: Path, against: str, several: SeveralNodes, *, fail_on_drift: bool, json: bool) -> None:
    """Print how settings changed since a run; raise UsageError if it recorded none. With ``fail_on_drift``, raise
    RunFailed for an important change or a node that could not be read."""
    run, reference = find_reference(install, against)
    found = read_nodes(install, several)
    report = DriftReport(
        against=f"run {run.id}",
        saved_at=run.started_at,
        nodes=found.settings.nodes,
        unknown_nodes=tuple(node for node in found.settings.nodes if node not in reference.nodes),
        not_read=found.not_read,
        missing={**reference.missing, **found.settings.missing},
        # A run also has the variables that its recipe and llmb set, so their absence here does not count.
        drift=tuple(one for one in find_drift(reference, found.settings) if one.after is not None),
    )
    print_output(report.model_dump(mode="json") if json else drift_tables(report, found.host_list))
    important = {one.key for one in report.drift if one.important}
    if fail_on_drift and important:
        raise RunFailed(f"important settings changed since {report.against}: {', '.join(sorted(important))}")
    if fail_on_drift and found.not_read:
        whole = len(found.settings.nodes) + len(found.not_read)
        raise RunFailed(f"{len(found.not_read)} of {whole} nodes cannot be read: {found.host_list([*found.not_read])}")


def find_reference(install: Path, text: str) -> tuple[RunRecord, NodesSettings]:
    """Return the newest selected run with settings of its nodes, and these settings; raise UsageError if there is no
    such run."""
    for run in reversed(find_ended_runs(text, install, say).runs):
        if run.record and (settings := settings_of_run(run.record)):
            if run.record.image:
                settings = settings.model_copy(update={"usual": {**settings.usual, "software.image": run.record.image}})
            return run.record, settings
    what = f"no run that '{text}' selects recorded the settings of its nodes"
    raise UsageError(what, do="pass a run of llmb's engine, or a Slurm job, that was not started with --no-resources")
