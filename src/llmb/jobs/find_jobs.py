# SPDX-License-Identifier: Apache-2.0
"""Finds jobs by id, name, label or campaign, parses times, and summarizes the jobs of each node."""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median

from llmb.base.errors import UsageError, closest, did_you_mean
from llmb.base.shown_text import counted
from llmb.jobs.job import Job
from llmb.jobs.store import Filter, Store
from llmb.launch.scheduler_lookup import find_scheduler

_AGO = re.compile(r"(\d+)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
NEAR = 5
SHOWN_BY = {"preparation": "'llmb prepare verify'", "benchmark": "'llmb bench list'", "check": "'llmb doctor --last'"}
LATEST = "latest"
GROUPS = ("label", "campaign")
CLOCKS_DIFFER_S = 3600
"""A run that was submitted more than this number of seconds in the future has a wrong time; it is the latest only if
all runs have a wrong time."""


def find_jobs(store: Store, texts: Iterable[str]) -> list[Job]:
    """Find the jobs that ``texts`` name, without duplicates; raise the errors of ``find_job``."""
    jobs = (find_job(store, text) for text in texts)
    return list({job.key: job for job in jobs}.values())


def find_job(store: Store, text: str) -> Job:
    """Find a job by its id or by the beginning of its folder name or short id.

    ``latest`` is the newest run made in this root. If a run was submitted several times, return its latest job. Raise
    UsageError if no job or several jobs match.
    """
    if text == LATEST:
        any_time = Filter(runs_only=True, made_here=True, limit=1)
        by_now = replace(any_time, until_s=time.time() + CLOCKS_DIFFER_S)
        if not (newest := store.jobs(by_now) or store.jobs(any_time)):
            do = "start one with 'llmb run' or 'llmb submit'"
            raise UsageError("there are no runs yet (imported ones do not count)", where=str(store.path), do=do)
        return newest[0]
    jobs = (store.find_named(text) or store.with_short_id(text)) if text else []
    same_id = [job for job in jobs if job.job_id == text]
    if same_id:
        return same_id[-1]
    latest = {job.name: job for job in jobs}
    if not latest:
        raise _unknown(store, text)
    if len(latest) > 1 and text not in latest:
        raise _ambiguous(text, list(latest.values()))
    return latest.get(text) or next(iter(latest.values()))


def find_run(store: Store, text: str) -> Job:
    """Find a job like ``find_job``; also raise UsageError if it is not a run."""
    job = find_job(store, text)
    if job.kind != "run":
        name = job.job_id or job.id
        do = f"run 'llmb jobs show {name}' to see the job, or {SHOWN_BY[job.kind]} to see its result"
        raise UsageError(f"job {name} is a {job.kind} ({job.subject}), not a run", where=job.run_dir, do=do)
    return job


def find_runs_by_name(store: Store, text: str) -> list[Job]:
    """Return the run with the id ``text``, or all runs with this label or in this campaign.

    Raise UsageError if ``text`` matches none of these, or several.
    """
    kind, colon, name = text.partition(":")
    spelled = kind if colon and kind in GROUPS else None
    name = name if spelled else text
    selections = {"label": Filter(label=name, runs_only=True), "campaign": Filter(campaign=name, runs_only=True)}
    groups = {
        f"{group}:{name}": jobs
        for group, selection in selections.items()
        if spelled in (None, group) and (jobs := store.jobs(selection))
    }
    if not groups:
        return [find_run(store, text)]
    ids = [] if spelled else store.find_named(text) or store.with_short_id(text)
    if len(groups) > 1 or ids:
        choices = [
            *(f"{one} ({counted(len(jobs), 'run')})" for one, jobs in groups.items()),
            *(job.id if job.job_id in (None, name) else str(job.job_id) for job in ids[:1]),
        ]
        raise UsageError(f"'{text}' is ambiguous", choices=choices, do="pass one of these instead")
    return next(iter(groups.values()))


def unknown_values(store: Store, selection: Filter) -> Iterator[str]:
    """Yield a message, with the existing values, for each selected label, campaign or workload that no job has."""
    for kind in ("label", "campaign", "workload"):
        name = getattr(selection, kind)
        if name is None or store.count(Filter(**{kind: name})):
            continue
        values = sorted({value for job in store.jobs() if (value := getattr(job, kind))})
        there_are = (
            f"{did_you_mean(name, values)}; {kind}s: {', '.join(values)}" if values else f", or any other {kind}"
        )
        yield f"no run has the {kind} '{name}'{there_are}"


def _ambiguous(text: str, jobs: list[Job]) -> UsageError:
    choices = [f"{job.name} ({job.id}, job {job.job_id})" for job in jobs[-NEAR:]]
    return UsageError(
        f"'{text}' matches {len(jobs)} jobs",
        choices=choices,
        do=f"pass more of the beginning of the name, or an id, such as '{jobs[-1].job_id or jobs[-1].id}'",
    )


def _unknown(store: Store, text: str) -> UsageError:
    if text and (count := store.count(Filter(label=text, runs_only=True))):
        do = f"run 'llmb runs --label {text}' to see ids; 'llmb judge' and 'llmb compare' accept a label"
        what = f"'{text}' is not an id, but the label of {counted(count, 'run')}"
        return UsageError(what, where=str(store.path), do=do)
    names = {name: job for job in store.jobs(Filter(limit=1000)) for name in (job.id, job.job_id, job.name) if name}
    near = closest(text, [*names, LATEST], cutoff=0.6, most=NEAR)
    return UsageError(
        f"there is no job '{text}' in the history",
        where=str(store.path),
        choices=near,
        do="see 'llmb jobs list', or run 'llmb jobs rebuild' to add jobs from run folders",
    )


def parse_since(text: str, now_s: float) -> float:
    """Convert a date, a time (local without a zone) or an age to seconds since 1970; raise UsageError otherwise."""
    ago = _AGO.fullmatch(text.strip())
    if ago:
        return now_s - int(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError as error:
        do = "pass an age such as 30m, 12h, 7d or 2w, a date such as 2026-11-21, or a time such as 2026-11-21T14:00"
        raise UsageError(f"'{text}' is not a date, a time or an age", do=do) from error


Recipe = tuple[str, str]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """Statistics of the jobs that trained on a node."""

    node: str
    runs: int
    """The number of jobs that used the node."""
    failures: int
    """The number of jobs on the node that failed."""
    blamed: int
    """Number of jobs in which the node was at fault."""
    slowdown: float | None
    """Median over recipes of the ratio of the median step times with and without this node; above 1 is slower. None if
    no recipe ran both with and without this node."""


def node_records(jobs: Iterable[Job]) -> list[NodeRecord]:
    """Return a record for each node that a run used, the slowest node first."""
    ran: dict[str, list[Job]] = defaultdict(list)
    times: dict[Recipe, list[tuple[frozenset[str], float]]] = defaultdict(list)
    for job in jobs:
        if job.kind != "run":
            continue
        nodes = frozenset(find_scheduler(job.scheduler).host_names(job.nodes))
        for node in nodes:
            ran[node].append(job)
        if job.step_time_s is not None:
            times[_recipe(job)].append((nodes, job.step_time_s))
    records = [_record(node, node_jobs, times) for node, node_jobs in ran.items()]
    return sorted(records, key=lambda record: (-(record.slowdown or 0), -record.blamed, record.node))


def _recipe(job: Job) -> Recipe:
    return job.identity or job.experiment, job.gpu_type


def _record(node: str, jobs: Sequence[Job], times: dict[Recipe, list[tuple[frozenset[str], float]]]) -> NodeRecord:
    ratios = []
    for recipe in {_recipe(job) for job in jobs}:
        here = [time for nodes, time in times[recipe] if node in nodes]
        elsewhere = [time for nodes, time in times[recipe] if node not in nodes]
        if here and elsewhere:
            ratios.append(median(here) / median(elsewhere))
    return NodeRecord(
        node=node,
        runs=len(jobs),
        failures=sum(job.status == "failed" for job in jobs),
        blamed=sum(node in (job.bad_nodes or "").split(",") for job in jobs),
        slowdown=median(ratios) if ratios else None,
    )
