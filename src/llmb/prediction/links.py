# SPDX-License-Identifier: Apache-2.0
"""The time of messages over the links between GPUs. Pure."""

from collections.abc import Container, Mapping
from functools import cached_property
from types import MappingProxyType

from llmb.catalogue.records import Gpu, Layout
from llmb.prediction.work import Messages
from llmb.runs.choices import Replicas

START_S, NVLINK_HOP_S, NETWORK_HOP_S = 8.4e-6, 3.4e-6, 9.6e-6
"""Seconds that a ring of NCCL takes to start, and per hop (protocol Simple, NCCL's src/graph/tuning.cc at 01afd20)."""
BUCKET, BUCKET_OF_REPLICA = 40e6, 1e6
"""A bucket has ``BUCKET`` parameters or, if that is more, ``BUCKET_OF_REPLICA`` per data-parallel rank (Megatron-core,
distributed_data_parallel.py, bucket_size)."""


class Links:
    """Links between a layout's ranks. Shares are of nominal bandwidth; ``measured`` has bytes per second within NVLink
    domains."""

    def __init__(
        self,
        layout: Layout,
        replicas: Replicas,
        gpu: Gpu,
        nvlink_share: float,
        network_share: float,
        measured: Mapping[str, float],
        joined: Container[str] = (),
        exchanges: Mapping[tuple[int, int, int], float] = MappingProxyType({}),
    ) -> None:
        self.exchanges = exchanges
        self.layout, self.replicas, self.gpu, self.measured, self.joined = layout, replicas, gpu, measured, joined
        self.nvlink = gpu.nvlink_gb_s / 2 * 1e9 * nvlink_share
        self.network = (gpu.network_gb_s or 0.0) * 1e9 * network_share

    @cached_property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Number of ranks per group (at most 2 for ``pp``), and how many share an NVLink domain."""
        layout, domain = self.layout, self.gpu.nvlink_domain_gpus
        dense, experts = layout.dp * layout.cp // self.replicas.dense, layout.edp // self.replicas.experts
        found = {
            "tp": (layout.tp, 1),
            "cp": (layout.cp, layout.tp),
            "dp": (dense, layout.tp),
            "dp_replicas": (self.replicas.dense, layout.tp * dense),
            "etp": (layout.etp, 1),
            "ep": (layout.ep, layout.etp),
            "edp": (experts, layout.etp * layout.ep),
            "edp_replicas": (self.replicas.experts, layout.etp * layout.ep * experts),
            "pp": (min(layout.pp, 2), layout.gpus // layout.pp),
        }
        return {
            name: (ranks, ranks if name in self.joined else max(1, min(ranks, domain // stride)))
            for name, (ranks, stride) in found.items()
        }

    def travel(self, message: Messages) -> float:
        """Return the seconds that messages take on the links, including latency; 0 in a group of one rank."""
        ranks, within = self.groups[message.group]
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // within)
        exchange = (ranks, nodes, int(message.size))
        if message.kind == "all_to_all" and exchange in self.exchanges and not (message.copies and nodes > 1):
            return message.number * self.exchanges[exchange]
        latency = START_S + (ranks - nodes) * NVLINK_HOP_S + (nodes - 1) * NETWORK_HOP_S
        nvlink = self.measured.get(message.kind, self.nvlink)
        volume = message.size * (2 if message.kind == "all_reduce" else 1)
        if message.kind == "send":
            return message.number * (START_S + volume / (nvlink if nodes == 1 else self.network))
        if nodes == 1:
            return message.number * (latency + volume * (ranks - 1) / ranks / nvlink)
        if message.kind == "all_to_all":
            beyond = volume * (nodes - 1) / nodes
            if message.copies:  # of a token's copies for experts on one node, one crosses the network
                beyond *= nodes * (1 - (1 - 1 / nodes) ** message.copies) / message.copies
            return message.number * (latency + max(beyond / self.network, volume * (within - 1) / ranks / nvlink))
        # Each member of the group in a node uses its own adapter.
        link = min(nvlink, within * self.network)
        return message.number * (latency + volume * (ranks - 1) / ranks / link)

    def bucket_latency(self, message: Messages, elements: int) -> float:
        """Return the seconds of the buckets' network hops, except the first bucket's, which ``travel`` includes."""
        ranks, within = self.groups[message.group]
        buckets = max(1.0, elements / max(BUCKET, BUCKET_OF_REPLICA * ranks))
        return (buckets - 1) * (-(-ranks // within) - 1) * NETWORK_HOP_S
