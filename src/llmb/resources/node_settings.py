# SPDX-License-Identifier: Apache-2.0
"""Settings of nodes that may change the time of a step, as text under dotted keys. Pure."""

from collections import Counter
from collections.abc import Mapping

from pydantic import Field

from llmb.catalogue.record import Record

PREFIXES = ("kernel.", "sysctl.", "cpu.", "bios.", "gpu.", "modules.", "nic.", "interface.", "pcie.", "image.")
"""How keys begin that only settings have."""
SET_OR_NOT = "variables."
"""How keys begin whose absence means something; what else is absent could not be read."""


FILE_ENDING = ".settings.json"
"""How names of the files end that samplers leave for the record of a run, one a node."""


class NodeSettings(Record):
    """Settings of one node."""

    values: dict[str, str]
    missing: dict[str, str]
    """Why keys that begin so could not be read, if there are none."""


class NodesSettings(Record):
    """Settings of several nodes: what most have once, and of each node what differs."""

    nodes: tuple[str, ...]
    usual: dict[str, str]
    """The value that most nodes have."""
    unlike: dict[str, dict[str, str | None]] = Field(default_factory=dict)
    """By node, other values than the usual ones; None where the node has none."""
    missing: dict[str, str]
    """Why keys that begin so could not be read on some node."""
    unread: dict[str, str] = Field(default_factory=dict)
    """Why other nodes have no settings at all."""

    def of_node(self, node: str) -> dict[str, str]:
        """What is usual, for a node that is not known."""
        values = {**self.usual, **self.unlike.get(node, {})}
        return {key: value for key, value in values.items() if value is not None}

    def with_others(self, others: "NodesSettings") -> "NodesSettings":
        """With other settings of the same nodes."""
        unlike = {
            node: {**self.unlike.get(node, {}), **others.unlike.get(node, {})}
            for node in self.nodes
            if node in self.unlike or node in others.unlike
        }
        missing = {**self.missing, **others.missing}
        usual = {**self.usual, **others.usual}
        return self.model_copy(update={"usual": usual, "unlike": unlike, "missing": missing})

    def of_all(self) -> dict[str, str]:
        """The value of all nodes, else all that occur."""
        every: dict[str, set[str]] = {}
        for node in self.nodes:
            for key, value in self.unlike.get(node, {}).items():
                every.setdefault(key, set()).update({value} if value is not None else ())
        usual = {key for key in every if any(key not in self.unlike.get(node, {}) for node in self.nodes)}
        for key in usual & self.usual.keys():
            every[key].add(self.usual[key])
        return self.usual | {key: ", ".join(sorted(values)) for key, values in every.items()}

    def nodes_by_value(self, key: str) -> dict[str | None, list[str]]:
        """The usual value first."""
        groups: dict[str | None, list[str]] = {self.usual.get(key): []}
        for node in self.nodes:
            own = self.unlike.get(node, {})
            groups.setdefault(own[key] if key in own else self.usual.get(key), []).append(node)
        return groups


def together(by_node: Mapping[str, NodeSettings]) -> NodesSettings:
    """Settings of nodes, which keep their order."""
    keys = sorted({key for settings in by_node.values() for key in settings.values})
    usual, unlike = dict[str, str](), dict[str, dict[str, str | None]]()
    for key in keys:
        values = {node: settings.values.get(key) for node, settings in by_node.items()}
        ((most, count),) = Counter(values.values()).most_common(1)
        if most is not None:
            usual[key] = most
        if count < len(values):
            for node, value in values.items():
                if value != most:
                    unlike.setdefault(node, {})[key] = value
    missing = {name: reason for settings in by_node.values() for name, reason in settings.missing.items()}
    return NodesSettings(nodes=tuple(by_node), usual=usual, unlike=unlike, missing=missing)
