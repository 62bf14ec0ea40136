# SPDX-License-Identifier: Apache-2.0
"""What of nodes' settings has changed since, and nodes of one run that are unlike the others. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from llmb.catalogue.record import Record
from llmb.missing import Missing
from llmb.resources.settings import PREFIXES, SET_OR_NOT, NodeSettings, NodesSettings, together
from llmb.runs.environment import GpuState
from llmb.runs.identity import Difference, Value, differences
from llmb.runs.record import RunRecord
from llmb.runs.recorded_identity import GPU_LIMITS
from llmb.runs.result import Result
from llmb.verdict.conditions import ERROR_AT_END, UNLIKE_NODES, Faults, rule_of, title_of

MOST_NAMED = 3
"""Nodes; of more the number."""
MOST_LISTED = 4
"""Settings that nodes of a run differ in."""


class Drift(Record):
    """A setting of a node that is not what it was. A value is None if there is none."""

    node: str
    key: str
    before: str | None
    after: str | None
    important: bool
    """Whether it is likely to change the time of a step."""


def gpu_limits(gpus: Sequence[GpuState]) -> dict[str, str]:
    """What is set on the GPUs of a node; where they differ, all that occurs."""
    every = {name: sorted({getattr(gpu, name) for gpu in gpus} - {None}) for name in GPU_LIMITS}
    return {f"hardware.{name}": ", ".join(map(_text, values)) for name, values in every.items() if values}


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_of_run(record: RunRecord) -> NodesSettings | Missing:
    """With those of its GPUs, which the record has as states."""
    settings, environment = record.settings, record.environment
    if isinstance(settings, Missing):
        return settings
    by_node: dict[str, list[GpuState]] = {node: [] for node in settings.nodes}
    for gpu in (environment.gpus if environment else None) or ():
        by_node.get(gpu.node, []).append(gpu)
    limits = {node: NodeSettings(values=gpu_limits(gpus), missing={}) for node, gpus in by_node.items()}
    return settings.with_others(together(limits))


def find_drift(before: NodesSettings, now: NodesSettings) -> tuple[Drift, ...]:
    """The important first. A node that was not there is compared with what was usual."""
    found = (one for node in now.nodes for one in _of_node(node, before.of_node(node), now.of_node(node)))
    return tuple(sorted(found, key=lambda one: (not one.important, one.key, str(one.after), str(one.before))))


def _of_node(node: str, before: dict[str, str], now: dict[str, str]) -> Iterable[Drift]:
    for key in before.keys() | now.keys():
        values = before.get(key), now.get(key)
        if values[0] != values[1] and rule_of(key).differs != "ignored" and is_comparable(key, *values):
            yield Drift(node=node, key=key, before=values[0], after=values[1], important=rule_of(key).important)


def is_comparable(key: str, *values: object) -> bool:
    """Whether a difference of the values of a setting means something: not where one could not be read."""
    return key.startswith(SET_OR_NOT) or None not in values


def known_differences(before: Mapping[str, Value], after: Mapping[str, Value]) -> tuple[Difference, ...]:
    """Differences between conditions of runs, without those of settings that one side does not tell.

    A side without any setting does not tell either which variables were set.
    """
    of_settings = (SET_OR_NOT, *PREFIXES)
    both_tell = all(any(key.startswith(of_settings) for key in side) for side in (before, after))
    only_if_told = PREFIXES if both_tell else of_settings
    every = differences(before, after)
    return tuple(one for one in every if not (one.key.startswith(only_if_told) and None in (one.before, one.after)))


def faults_of(record: RunRecord, result: Result) -> Faults:
    """What disturbed the run, by its result and by its record."""
    unlike, code = unlike_nodes(record), record.exit_code
    known = {**result.faults, **({UNLIKE_NODES: unlike} if unlike else {})}
    if result.status != "success" or not code:
        return known
    return {**known, ERROR_AT_END: (f"exit code {code}", *known.get(ERROR_AT_END, ()))}


def unlike_nodes(record: RunRecord) -> tuple[str, ...]:
    """In words, nodes of a run with another important setting than the others."""
    settings = settings_of_run(record)
    if not settings:
        return ()
    keys = sorted({key for own in settings.unlike.values() for key in own if rule_of(key).important})
    texts = [_unlike(title_of(key), settings.nodes_by_value(key)) for key in keys if _all_known(settings, key)]
    more = len(texts) - MOST_LISTED
    return (*texts[:MOST_LISTED], *([f"{more} other settings differ, too"] if more > 0 else []))


def _all_known(settings: NodesSettings, key: str) -> bool:
    return is_comparable(key, *settings.nodes_by_value(key))


def _unlike(title: str, groups: dict[str | None, list[str]]) -> str:
    """The fewest first: they are the ones to look at."""
    each = sorted(groups.items(), key=lambda group: len(group[1]))
    return f"{title} is " + " and ".join(f"{value or 'unset'} on {named_nodes(nodes)}" for value, nodes in each)


def named_nodes(nodes: Sequence[str]) -> str:
    if len(nodes) <= MOST_NAMED:
        return ", ".join(nodes)
    return f"{len(nodes)} nodes"
