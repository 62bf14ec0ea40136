# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor`` over several nodes."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmb.catalogue.load import Catalogue
from llmb.cli.progress import NodeProgress
from llmb.cli.root import say
from llmb.errors import EnvironmentProblem, RunFailed, UsageError, UserInterrupt
from llmb.health.check_nodes import NodesCheck, stored
from llmb.health.exclusion import listed_in, listed_names
from llmb.health.kept_checks import CheckFolder, NodesRequest, NodesResult, last_check, new_check
from llmb.health.node_jobs import CheckTerms
from llmb.health.records import NodeReport
from llmb.health.wanted import check_gpu_type
from llmb.jobs.history import open_history
from llmb.report.doctor_report import nodes_document, nodes_tables
from llmb.report.output import print_output
from llmb.runs.record_file import BrokenRecord
from llmb.schedulers.lookup import QUEUE, find_scheduler, read_cluster_site
from llmb.schedulers.port import NodeState, Scheduler

TIME_LIMIT_MIN, MAX_WAIT_MIN = 10, 15.0
ASK_S = 60.0


class Limits(NamedTuple):
    """In minutes: of the check of one node, and until its job begins."""

    time_limit: int
    max_wait: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The options that choose nodes."""

    nodes: str | None
    file: Path | None
    partition: str | None
    every: bool

    @property
    def any(self) -> bool:
        return self.every or any(item is not None for item in (self.nodes, self.file, self.partition))

    @property
    def listed(self) -> str | None:
        """Raises UsageError where several lists are given, or the file cannot be read."""
        if sum((self.nodes is not None, self.file is not None, self.every)) > 1:
            raise UsageError("--nodes, --nodelist-file and --all cannot be combined", do="give one of them")
        return listed_in(self.file) if self.file else self.nodes


def doctor_nodes(
    install: Path, chosen: Chosen, request: NodesRequest, values: Mapping[str, Any], limits: Limits, *, json: bool
) -> None:
    """Checks the nodes and prints the result, also if it is interrupted.

    Raises UsageError, InfrastructureError, UserInterrupt, and RunFailed if a node is unfit.
    """
    scheduler, catalogue = find_scheduler(QUEUE), Catalogue()
    site = read_cluster_site(catalogue, install, os.environ)
    check_gpu_type(catalogue, request.gpu_type)
    options = scheduler.read_options({**values, "time_limit": str(limits.time_limit)}, os.environ, sys.executable)
    states = _states(scheduler, chosen)
    folder = new_check(install, request.model_copy(update={"nodes": tuple(states)}))
    nodes = "1 node" if len(states) == 1 else f"{len(states)} nodes"
    say(f"checking {nodes} ({folder.path}); Ctrl-C keeps what is reported, and cancels the rest")
    with open_history(install, say) as store, NodeProgress(len(states)) as progress:
        check = NodesCheck(
            store=store,
            terms=CheckTerms(site, options, limits.time_limit),
            folder=folder,
            states=states,
            max_wait_s=limits.max_wait * 60,
            environ=os.environ,
            on_progress=progress.nodes,
            say=say,
        )
        complete = check.run()
    result = check.result(request.started_at)
    _print(result, folder, scheduler, json=json)
    if not complete:
        count = len(result.unchecked)
        do = "'llmb doctor --last' shows the result again"
        raise UserInterrupt(f"interrupted; {count} of {len(states)} nodes were not checked", do=do)
    raise_unless_fit(result.reports)


def show_last(install: Path, chosen: Chosen, *, json: bool) -> None:
    """Raises UsageError if there is none, and RunFailed if a node is unfit."""
    if chosen.partition or chosen.every:
        raise UsageError("--last shows a check again, and takes --nodes alone", do="omit --partition and --all")
    folder, scheduler = last_check(install), find_scheduler(QUEUE)
    try:
        result = stored(folder)
    except BrokenRecord:
        raise
    except OSError as error:
        raise EnvironmentProblem(f"it cannot be read: {error.strerror}", where=str(folder.path)) from error
    if (listed := chosen.listed) is not None:
        result = _only(result, listed_names(listed, listed))
    _print(result, folder, scheduler, json=json)
    raise_unless_fit(result.reports)


def _only(result: NodesResult, names: Sequence[str]) -> NodesResult:
    reports = {report.node: report for report in result.reports}
    if missing := [name for name in names if name not in reports]:
        raise UsageError(f"the last check did not include {', '.join(missing)}", choices=reports)
    return result.model_copy(update={"reports": tuple(reports[name] for name in dict.fromkeys(names))})


def _states(scheduler: Scheduler, chosen: Chosen) -> dict[str, NodeState]:
    """All nodes of a list, or the usable ones of a partition or the cluster; then the others are named."""
    listed = chosen.listed
    states = scheduler.nodes(listed, chosen.partition if listed is None else None, ASK_S)
    if listed is not None:
        return states
    for node, state in states.items():
        if not state.usable:
            say(f"note: {node} is left out: {state.problem}")
    usable = {node: state for node, state in states.items() if state.usable}
    if not usable:
        raise UsageError(
            "none of these nodes accepts jobs", do="see 'sinfo -R'; --nodes LIST reports each with its reason"
        )
    return usable


def _print(result: NodesResult, folder: CheckFolder, scheduler: Scheduler, *, json: bool) -> None:
    print_output(
        nodes_document(result, str(folder.path), scheduler.host_list)
        if json
        else nodes_tables(result, str(folder.path), scheduler.host_list)
    )


def raise_unless_fit(reports: Sequence[NodeReport]) -> None:
    """Raises RunFailed if a check of a node fails."""
    unfit = [report for report in reports if report.status == "fail"]
    if len(unfit) == 1:
        failed = [check.name for check in unfit[0].checks if check.status == "fail"]
        count = "1 check fails" if len(failed) == 1 else f"{len(failed)} checks fail"
        raise RunFailed(f"{unfit[0].node} is not fit: {count}: {', '.join(failed)}")
    if unfit:
        names = find_scheduler(QUEUE).host_list(report.node for report in unfit)
        raise RunFailed(f"{len(unfit)} of {len(reports)} nodes are not fit: {names}")
