# SPDX-License-Identifier: Apache-2.0
"""A step on paper: the work that a rank was counted to do, at rates that nothing was fitted to. Pure.

No GPU has confirmed it. Not counted: the host, launches of kernels, clocks that fall with power, ranks that wait for
slower ones, and casts of FP8 weights after they were gathered, 4 bytes per parameter and step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from llmb.catalogue.records import Gpu, Layout
from llmb.runs.rank_account import CollectiveCount, RankAccount

MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU attains. Shares are of the figures of the catalogue, NVLink's in one direction; see ``SOURCES``.

    overlaps: whether the engine multiplies while tensor-parallel messages travel, and between stages.
    """

    bf16_share: float = 0.70
    fp8_share: float = 0.60
    fp32_share: float = 0.35
    attention_share: float = 0.57
    memory_share: float = 0.77
    nvlink_share: float = 0.80
    network_share: float = 0.90
    start_s: float = 8.4 * MICRO
    nvlink_hop_s: float = 3.4 * MICRO
    network_hop_s: float = 9.6 * MICRO
    update_bytes: float = 30.1
    overlaps: bool = True


SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "bf16_share": "assumed: 690 of 989 TFLOP/s in large products of an H100 at 700 W",
        "fp8_share": "assumed: 1,190 of 1,979 TFLOP/s, with fast accumulation in the forward pass only",
        "fp32_share": "assumed, of the bf16 peak: TF32 has half of it; few products are in fp32",
        "attention_share": "cuDNN's frontend, for cuDNN 9.19 at 8k: 644 TFLOP/s forward, 541 backward, weighed 2 to 5",
        "memory_share": "assumed: 3.7 of 4.8 TB/s of an H200",
        "nvlink_share": "assumed: 360 of 450 GB/s of an H100, a ring of 8 GPUs",
        "network_share": "assumed: 45 of 50 GB/s",
        "start_s": "NCCL, src/graph/tuning.cc at 01afd20: base latency of a ring, protocol Simple",
        "nvlink_hop_s": "the same: latency of a step by NVLink",
        "network_hop_s": "the same: latency of a step by the network",
        "update_bytes": "benchmarks/generated_code/bounds.yaml: per parameter that a rank updates, with the norm",
    }
)
RATES = Rates()
PIPELINE = "pp"
OF_STEP = ("dp", "world", "replicate")
"""First words of groups that exchange gradients and parameters once a step."""


@dataclass(frozen=True, slots=True)
class PaperStep:
    """Seconds by term, of the rank that takes longest; they sum to the step."""

    rank: int
    terms: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    def largest(self, number: int) -> list[tuple[str, float]]:
        return sorted(self.terms.items(), key=lambda each: -each[1])[:number]


def step_on_paper(
    accounts: Sequence[RankAccount], counted: Layout, layout: Layout, gpu: Gpu, rates: Rates = RATES
) -> PaperStep:
    """From some ranks of a pipeline; those that are not given are taken to be no slower.

    counted: the layout that was counted, from which ``layout`` may differ in its number of data-parallel replicas.
    """
    paper = [_Paper(account, counted, layout, gpu, rates) for account in accounts]
    slowest = max(paper, key=lambda each: sum(each.busy().values()))
    waits = (layout.pp - 1) / (layout.vp * layout.ga)
    bubble = waits * sum(sum(each.busy().values()) for each in paper) / len(paper)
    terms = {**slowest.busy(), **slowest.once(), "pipeline bubble": bubble}
    return PaperStep(slowest.account.rank, {name: seconds for name, seconds in terms.items() if seconds})


class _Paper:
    """One rank."""

    def __init__(self, account: RankAccount, counted: Layout, layout: Layout, gpu: Gpu, rates: Rates) -> None:
        self.account, self.counted, self.layout, self.gpu, self.rates = account, counted, layout, gpu, rates

    def flops_per_s(self, kind: str) -> float:
        share = {
            "fp8": self.rates.fp8_share,
            "bf16": self.rates.bf16_share,
            "fp32": self.rates.fp32_share,
            "attention": self.rates.attention_share,
        }[kind]
        return share * self.gpu.peak_tflops["fp8" if kind == "fp8" else "bf16"] * 1e12

    @property
    def bytes_per_s(self) -> float:
        return self.rates.memory_share * self.gpu.memory_bandwidth_tb_s * 1e12

    def busy(self) -> dict[str, float]:
        """Seconds of all micro-batches: while others of its pipeline have nothing to do, a rank does none of this."""
        terms = {_NAMES[kind]: number / self.flops_per_s(kind) for kind, number in self.account.flops_by_kind.items()}
        terms["memory"] = self.account.moved_bytes / self.bytes_per_s
        return terms | self.communication(of_step=False)

    def once(self) -> dict[str, float]:
        """Seconds at the end of a step."""
        own = self.account.bytes_by_owner["optimizer"] / 8 * _replicas(self.counted) / _replicas(self.layout)
        return {"optimizer": own * self.rates.update_bytes / self.bytes_per_s} | self.communication(of_step=True)

    def communication(self, *, of_step: bool) -> dict[str, float]:
        """Exposed seconds by kind and group."""
        terms: dict[str, float] = {}
        for each in self.account.collectives:
            of_data = dimensions(each.group)[0] in OF_STEP and each.kind != "all_to_all"  # which experts exchange
            if of_data == of_step and each.kind != "barrier":
                name = f"{each.group.split()[0]} {each.kind.replace('_', '-')}"
                terms[name] = terms.get(name, 0) + self.exposed(each)
        return terms

    def exposed(self, collective: CollectiveCount) -> float:
        whole = self.seconds(collective, collective.bytes, collective.count)
        if dimensions(collective.group)[0] == PIPELINE:
            # Both ends take the same time, and with virtual stages other micro-batches pass meanwhile.
            hidden = self.rates.overlaps and self.layout.vp > 1
            return 0 if hidden or collective.kind == "send" else whole
        share = collective.beside_bytes / collective.bytes if collective.bytes else 0
        if not self.rates.overlaps:
            return whole * (1 - share) if collective.kind == "all_gather" else whole
        return whole - min(share * whole, collective.beside_flops / self.flops_per_s(self.main_kind))

    @property
    def main_kind(self) -> str:
        products = {kind: flops for kind, flops in self.account.flops_by_kind.items() if kind != "attention"}
        return max(products, key=products.__getitem__)

    def seconds(self, collective: CollectiveCount, size: int, count: int) -> float:
        """Alpha and beta: a ring's latency for each message, and bytes over the slowest link that they pass."""
        ranks, within = self.members(collective.group)
        if ranks == 1:
            return 0
        nodes = -(-ranks // within)
        rates = self.rates
        alpha = rates.start_s + (ranks - nodes) * rates.nvlink_hop_s + (nodes - 1) * rates.network_hop_s
        nvlink = rates.nvlink_share * self.gpu.nvlink_gb_s / 2 * 1e9
        volume = size * _VOLUME[collective.kind]
        if nodes == 1:
            return count * alpha + volume * _part(collective.kind, ranks, 1) / nvlink
        if self.gpu.network_gb_s is None:
            raise ValueError(f"the catalogue has no network of {self.gpu.gpu_type}")
        network = rates.network_share * self.gpu.network_gb_s * 1e9
        if collective.kind == "all_to_all":
            return count * alpha + volume * _part(collective.kind, ranks, within) / network
        # Members of a node use as many adapters.
        return count * alpha + volume * _part(collective.kind, ranks, 1) / min(nvlink, within * network)

    def members(self, group: str) -> tuple[int, int]:
        """Ranks of a group, and how many of them share an NVLink domain."""
        layout = self.layout
        strides = {"tp": 1, "cp": layout.tp, "dp": layout.tp * layout.cp, "pp": layout.gpus // layout.pp}
        sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": min(layout.pp, 2)}
        names = dimensions(group)
        if names[0] == "world":
            ranks, stride = layout.gpus, 1
        elif names[0] == "replicate":
            ranks, stride = layout.dp * layout.cp, layout.tp
        elif unknown := set(names) - set(sizes):
            raise ValueError(f"no ranks are known of the group {group}: {', '.join(sorted(unknown))}")
        else:
            ranks, stride = 1, min(strides[name] for name in names)
            for name in names:
                ranks *= sizes[name]
        return ranks, max(1, min(ranks, self.gpu.nvlink_domain_gpus // stride))


def rates_before(layout: Layout) -> Rates:
    """Rates of the engine before the layouts were reworked: every message is waited for, nothing is gathered again, and
    attention under context parallelism takes FlashAttention-2, which is 1.5 times slower."""
    slower = 1.5 if layout.cp > 1 else 1
    return replace(RATES, attention_share=RATES.attention_share / slower, overlaps=False)


def dimensions(group: str) -> list[str]:
    """``dp_cp``, ``mesh_dp_cp_tp`` and ``pp forward 1`` are groups of some dimensions of a layout."""
    return group.split()[0].removeprefix("mesh_").split("_")


def _replicas(layout: Layout) -> int:
    return layout.dp * layout.cp


def _part(kind: str, ranks: int, kept: int) -> float:
    """The part of a message that does not stay with ``kept`` of the ranks."""
    return 1 if kind in ("send", "recv", "broadcast") else (ranks - kept) / ranks


_NAMES: Mapping[str, str] = MappingProxyType(
    {"bf16": "products bf16", "fp8": "products fp8", "fp32": "products fp32", "attention": "attention"}
)
_VOLUME: Mapping[str, int] = MappingProxyType(
    {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "send": 1, "recv": 1, "broadcast": 1, "all_reduce": 2}
)


def share_text(terms: Iterable[tuple[str, float]], whole: float) -> str:
    """``products bf16 61 %, attention 12 %``."""
    return ", ".join(f"{name} {100 * seconds / whole:.0f} %" for name, seconds in terms)
