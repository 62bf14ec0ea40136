# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor --against``: settings of nodes now and in a run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.analysis.find_runs import find_ended_runs
from llmb.cli.root import say
from llmb.errors import RunFailed, UsageError
from llmb.health.settings import settings_here
from llmb.report.doctor_report import DriftReport, HostList, drift_tables
from llmb.report.output import print_output
from llmb.resources.host import host_name
from llmb.resources.settings import NodesSettings, together
from llmb.runs.conditions import Drift, find_drift, settings_of_run


class ReadNodes(NamedTuple):
    """What was read of the nodes that were asked for, and why others were not."""

    settings: NodesSettings
    not_read: dict[str, str]
    host_list: HostList


class DriftReference(NamedTuple):
    """The run that nodes are compared with."""

    title: str
    started_at: str | None
    settings: NodesSettings

    def drift(self, now: NodesSettings) -> tuple[Drift, ...]:
        """A run has variables that its recipe and llmb set: that a shell has none says nothing."""
        return tuple(one for one in find_drift(self.settings, now) if one.after is not None)


def read_here(install: Path) -> ReadNodes:
    """Raises UsageError."""
    return ReadNodes(together({host_name(): settings_here(install, os.environ)}), {}, ",".join)


def compare_settings(
    install: Path, against: str, read: Callable[[], ReadNodes], *, fail_on_drift: bool, json: bool
) -> None:
    """Raises UsageError, and with ``fail_on_drift`` RunFailed for important drift, and for a node that was not read."""
    reference = find_reference(install, against)
    found = read()
    report = DriftReport(
        against=reference.title,
        saved_at=reference.started_at,
        nodes=found.settings.nodes,
        unknown_nodes=tuple(node for node in found.settings.nodes if node not in reference.settings.nodes),
        not_read=found.not_read,
        missing={**reference.settings.missing, **found.settings.missing},
        drift=reference.drift(found.settings),
    )
    print_output(report.model_dump(mode="json") if json else drift_tables(report, found.host_list))
    important = {one.key for one in report.drift if one.important}
    if fail_on_drift and important:
        raise RunFailed(f"settings have changed since {reference.title}: {', '.join(sorted(important))}")
    if fail_on_drift and found.not_read:
        raise _not_read(found)


def _not_read(found: ReadNodes) -> RunFailed:
    whole = len(found.settings.nodes) + len(found.not_read)
    return RunFailed(f"{len(found.not_read)} of {whole} nodes were not read: {found.host_list([*found.not_read])}")


def find_reference(install: Path, text: str) -> DriftReference:
    """The newest run that ``text`` stands for and that has settings. Raises UsageError if there is none."""
    runs = find_ended_runs(text, install, say).runs
    found = [reference for run in runs if (reference := _of_run(run))]
    if not found:
        what = f"no run of '{text}' has settings of its nodes"
        raise UsageError(what, do="runs whose nodes are sampled have them: give another")
    return found[-1]


def _of_run(run: AnalyzedRun) -> DriftReference | None:
    record = run.record
    settings = settings_of_run(record) if record else None
    if record is None or not settings:
        return None
    if record.image:
        settings = settings.model_copy(update={"usual": {**settings.usual, "software.image": record.image}})
    return DriftReference(f"run {run.id}", record.started_at, settings)
