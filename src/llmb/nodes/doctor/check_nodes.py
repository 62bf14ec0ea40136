# SPDX-License-Identifier: Apache-2.0
"""Checks several nodes with a job for each, and collects their reports."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmb.base.errors import InfrastructureError, LlmbError, UsageError
from llmb.catalogue.resolve import CPU
from llmb.jobs.job import Job
from llmb.jobs.store import Store
from llmb.jobs.submit import submit_task
from llmb.jobs.task import TaskOrder, TaskRecord
from llmb.jobs.wait import PATIENCE_S, pause_s
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.jobspec.spec import PYTHON, Placement
from llmb.launch.scheduler_lookup import scheduler_of
from llmb.launch.scheduler_port import JobState, NodeState, Scheduler
from llmb.launch.site.site import Site
from llmb.nodes.doctor.check_records import NodeReport
from llmb.nodes.doctor.checked_nodes import (
    CheckFolder,
    NodesResult,
    Problem,
    broken,
    compared,
    discard,
    unchecked,
    write_result,
)
from llmb.runs.folder import BrokenRecord

ASK_S = 20.0
NODES_EVERY_S = 30.0
"""Seconds between queries for the states of nodes while their jobs are queued."""
LATE_S = 60.0
"""Seconds after which every client of a file system sees a file that another node has written."""
GRACE_S = 120.0
"""Seconds beyond the time limit that the scheduler has to end a job."""
MOST_REJECTED = 3
"""The check fails if this many jobs, or all, are rejected before one is accepted."""
LAST_WORDS = 200
"""The maximum number of characters to show of a log's last line."""
OF_RUNS = frozenset(["nodelist", "exclude", "dependency", "segment", "signal", "begin"])
"""Flags that a shell may set for training jobs, but that checks set themselves or do not need."""
Say = Callable[[str], None]
OnProgress = Callable[[str, int, int], None]
"""A function that is called with ``submitted`` or ``checked``, the number of these nodes, and the total."""


@dataclass(frozen=True, slots=True)
class CheckTerms:
    """The site, options and time limit of the jobs that check nodes."""

    site: Site
    options: JobOptions
    time_limit_min: int


@dataclass
class NodesCheck:
    """A check of several nodes in progress; ``reports`` contains the results so far, by node."""

    store: Store
    terms: CheckTerms
    folder: CheckFolder
    states: Mapping[str, NodeState]
    max_wait_s: float
    environ: Mapping[str, str]
    on_progress: OnProgress
    say: Say
    reports: dict[str, NodeReport] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the beginning of the wait until the job of a node without a report first seemed ended or lost."""

    @property
    def scheduler(self) -> Scheduler:
        return scheduler_of(self.terms.site)

    def _no_jobs(self, state: NodeState) -> Problem:
        return Problem("fail", f"{self.scheduler.title} does not schedule jobs on it: {state.problem}", "state")

    def run(self) -> bool:
        """Submit a job for each usable node and wait for their reports; return False on Ctrl-C.
        On Ctrl-C and errors, jobs without a report are cancelled; InfrastructureError only causes a warning. Raises
        UsageError if the first jobs are all rejected, EnvironmentProblem if jobs cannot be submitted from here."""
        unusable = {node: state for node, state in self.states.items() if not state.usable}
        self.reports = {node: self._no_jobs(state).report(node) for node, state in unusable.items()}
        try:
            self._submit({node: state for node, state in self.states.items() if state.usable})
            self._wait()
        except KeyboardInterrupt:
            self._give_up("it was interrupted")
            return False
        except InfrastructureError as error:
            self.say(f"warning: {error.what}")
            self._give_up(error.what)
        except LlmbError:
            self._cancel(self._open())
            if not self.jobs:
                discard(self.folder)  # no node was checked, so the previous check is still the last one
            raise
        return True

    def _submit(self, usable: Mapping[str, NodeState]) -> None:
        for number, (node, state) in enumerate(usable.items()):
            self.on_progress("submitted", number, len(usable))
            base = self.folder.job(node)
            try:
                self.jobs[node] = submit_task(
                    self.store, check_order(self.terms, self.folder, node, state), self.environ, base
                )
            except UsageError as error:
                self._report(node, unchecked(error.what))
                if not self.jobs and number + 1 == min(MOST_REJECTED, len(usable)):
                    raise

    def result(self, started_at: str) -> NodesResult:
        """Compare the reports, write the result to the folder and return it; raise NotWritable if that fails."""
        ordered = [self.reports[node] for node in self.states]
        result = NodesResult(started_at=started_at, reports=tuple(compared(ordered)))
        write_result(self.folder, result)
        return result

    def _open(self) -> list[str]:
        return [node for node in self.jobs if node not in self.reports]

    def _report(self, node: str, problem: Problem) -> None:
        self.reports[node] = problem.report(node)

    def _wait(self) -> None:
        began = last_s = time.monotonic()
        nodes_at = began + NODES_EVERY_S
        while True:
            self._collect()
            nodes = self._open()
            self.on_progress("checked", len(self.states) - len(nodes), len(self.states))
            if not nodes:
                return
            now = time.monotonic()
            try:
                waiting = self._judge(now - began)
                if waiting and now >= nodes_at:
                    self._drop_unusable(waiting)
                    nodes_at = now + NODES_EVERY_S
                last_s = now
            except InfrastructureError:
                if now - last_s > PATIENCE_S:
                    raise
            if self._open():
                time.sleep(pause_s(now - began))

    def _collect(self) -> None:
        for node in self._open():
            try:
                self.reports[node] = self.folder.read_report(node)
            except BrokenRecord as error:
                self._report(node, broken(error))
            except FileNotFoundError:
                continue
            except OSError as error:
                self._report(node, Problem("fail", f"its report cannot be read: {error.strerror}"))

    def _judge(self, waited_s: float) -> list[str]:
        """Report a problem if a job will write no report, and cancel it if active; return nodes with queued jobs."""
        open_jobs = {self.jobs[node].key: node for node in self._open()}
        answers = self.scheduler.states([self.jobs[node] for node in open_jobs.values()], ASK_S)
        states = {open_jobs[key]: state for key, state in answers.states.items()}
        reasons = {node: self._problem(node, state, waited_s) for node, state in states.items()}
        problems = {node: problem for node, problem in reasons.items() if problem}
        if problems:
            self._collect()  # a report may have appeared since
        silent = [node for node in self._open() if node in problems]
        for node in silent:
            self._report(node, problems[node])
        self._cancel([node for node in silent if not states[node].ended])
        return [node for node in self._open() if node in states and states[node].phase == "queued"]

    def _problem(self, node: str, state: JobState, waited_s: float) -> Problem | None:
        limit_s = self.terms.time_limit_min * 60
        if state.phase == "queued" and waited_s > self.max_wait_s:
            why = f": {state.meaning}" if state.meaning else ""
            return unchecked(f"its job was queued for {self.max_wait_s / 60:g} min{why}")
        if state.phase == "running":
            late = state.started_s is not None and time.time() - state.started_s > limit_s + GRACE_S
            return self._silent() if late else None
        is_lost = state.phase == "unknown" and waited_s > limit_s + GRACE_S
        if not state.ended and not is_lost:
            return None
        since = self.ended_s.setdefault(node, waited_s)
        if state.phase in ("completed", "unknown") and waited_s - since < LATE_S:
            return None
        if state.phase == "timed_out":
            return self._silent()
        if state.phase in ("cancelled", "preempted"):
            return unchecked(f"its job was {state.meaning or state.phase}")
        base = self.folder.job(node)
        lines = (line for path in (base.log, base.batch_output) for line in reversed(_lines(path)))
        words = next(lines, "")[:LAST_WORDS]
        return Problem("fail", f"its task wrote no report: {state.meaning or 'it ended'}{words and f': {words}'}")

    def _silent(self) -> Problem:
        return Problem("fail", f"it did not answer within {self.terms.time_limit_min} min", "time")

    def _drop_unusable(self, waiting: list[str]) -> None:
        states = self.scheduler.nodes(self.scheduler.host_list(waiting), None, ASK_S)
        lost = {node: state for node, state in states.items() if not state.usable}
        for node, state in lost.items():
            self._report(node, self._no_jobs(state))
        self._cancel(list(lost))

    def _give_up(self, why: str) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            self._collect()
            self._cancel(self._open())
        for node in self.states:
            if node not in self.reports:
                self._report(node, unchecked(why))

    def _cancel(self, nodes: list[str]) -> None:
        try:
            if nodes:
                self.scheduler.cancel([self.jobs[node] for node in nodes])
        except LlmbError as error:
            ids = ",".join(str(self.jobs[node].job_id) for node in nodes)
            self.say(f"warning: jobs {ids} could not be cancelled: {error.what}")


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def check_order(terms: CheckTerms, folder: CheckFolder, node: str, state: NodeState) -> TaskOrder:
    """Return the job that checks ``node``, in the requested partition, else in the default one if it has the node, else
    in the node's first partition."""
    flags = {name: value for name, value in terms.options.flags.items() if name not in OF_RUNS}
    base = folder.job(node)
    order = TaskOrder(
        task=TaskRecord(
            kind="check",
            subject=node,
            gpus=bool(state.gpus),
            gpu_type=None if state.gpus else CPU,
            scale=state.gpus or 1,
        ),
        name=base.name,
        parent=base.path.parent,
        title=f"check of {node} by llmb doctor",
        placement=Placement(1, state.gpus or 1, whole_nodes=True),
        time_limit_min=terms.time_limit_min,
        work=(PYTHON, "-P", "-m", "llmb.nodes.doctor.node", str(folder.path), node),
        node=node,
        in_container=False,
        options=replace(terms.options, flags=flags),
        site=terms.site,
    )
    if "partition" in flags or not state.partitions or order.spec(base).flags.get("partition") in state.partitions:
        return order
    return replace(order, options=replace(terms.options, flags={**flags, "partition": state.partitions[0]}))
