# SPDX-License-Identifier: Apache-2.0
"""Calibrates the rates of predictions with measurements of ``llmb bench``. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from llmb.base.errors import UsageError
from llmb.catalogue.records import Gpu, gpu_type_of
from llmb.nodes.bench.device_bench import MIB, PASS_WORDS, attention_shapes
from llmb.nodes.bench.measurements import Measurement, MeasurementFile
from llmb.prediction.prediction import Calibration, chip_rates
from llmb.prediction.sizes import BF16, Sizes
from llmb.prediction.step_time import USUAL_SMS
from llmb.prediction.work import MeasuredMachine, ProductShape, filled
from llmb.runs.plan import EnginePlan

USED = ("gemm", "attention", "memory", "collectives")
LEAST_COPY, LEAST_MESSAGE = 512 * MIB, 64 * MIB
"""Minimum sizes in bytes: smaller copies stay in a cache, and smaller messages are limited by latency."""
KINDS = {"alltoall": "all_to_all", "sendrecv": "send"}
"""Names of collectives in predictions, by their names in nccl-tests, where they differ."""
OUT_OF_PLACE = re.compile(r"out of place(?:, (\d+) nodes)?")
_PASSES = {word: name for name, word in PASS_WORDS.items()}


def calibrate_with_bench(
    files: Sequence[MeasurementFile], plan: EnginePlan, gpu: Gpu, types: Iterable[Gpu], usual: Calibration
) -> Calibration:
    """Return ``usual`` with measured rates. If several files contain a case, the last file counts.

    ``types`` are the GPU types that may have been measured. Raises UsageError if a device is not of the type ``gpu``,
    if the files contain no measurement that predictions use, or if the time of a matrix product is implausible.
    """
    newest = {row.identity: row for file in files for row in file.measurements if row.benchmark in USED}
    title = f"llmb bench on {files[-1].node}"
    for row in newest.values():
        if gpu_type_of(row.device, types) != gpu.gpu_type:
            raise UsageError(
                f"{title} measured {row.device}, but the prediction is for {gpu.gpu_type}",
                do=f"pass --calibrate with measurements of {gpu.gpu_type}",
            )
    rates = _Rates(list(newest.values()), plan, gpu, usual)
    if not rates.texts:
        do = "on a GPU, run 'llmb bench gemm --dtype bf16' or 'llmb bench memory', and pass its result"
        raise UsageError(f"the result of {title} contains no measurement that predictions use", do=do)
    text = f"{title}: {', '.join(rates.texts)}; the rest as in published steps"
    machine = MeasuredMachine(rates.products, rates.links, rates.exchanges)
    return replace(usual, text=text, rates=rates.rates, machine=machine, error="bench")


class _Rates:
    """The measured rates. Memory comes first, because the times of products include writing their results."""

    def __init__(self, rows: Sequence[Measurement], plan: EnginePlan, gpu: Gpu, usual: Calibration) -> None:
        self.rows, self.gpu, self.usual = rows, gpu, chip_rates(usual.rates, gpu.relative_efficiency)
        self.rates = dict(self.usual)
        self.products: dict[ProductShape, float] = {}
        self.links: dict[str, float] = {}
        self.exchanges: dict[tuple[int, int, int], float] = {}
        self.texts: list[str] = []
        self._add_memory()
        for dtype in ("bf16", "fp8"):
            self._add_products(dtype)
        self._add_attention({shape.text for shape in attention_shapes(plan.recipe)})
        self._add_links()
        self._add_exchanges(plan)

    def _of(self, benchmark: str, dtype: str | None = None) -> tuple[list[Measurement], float]:
        """Return a benchmark's bursts in a dtype, and the largest ratio of a case's sustained time to its burst time; 1
        if no case has both."""
        rows = [row for row in self.rows if row.benchmark == benchmark and row.dtype == dtype]
        bursts = {_case(row): row for row in rows if not row.sustained}
        sustained = [row for row in rows if row.sustained and _case(row) in bursts]
        slowdowns = [row.time_s / bursts[_case(row)].time_s for row in sustained]
        return list(bursts.values()), max(slowdowns, default=1.0)

    def _add_memory(self) -> None:
        copies = [row for row in self.rows if row.benchmark == "memory" and (row.size_bytes or 0) >= LEAST_COPY]
        if not copies:
            return
        largest = max(copies, key=lambda row: (row.size_bytes or 0, row.sustained))
        reached = largest.bandwidth_gb_per_s or 0.0
        self.rates["memory"] = 1000 * self.gpu.memory_bandwidth_tb_s / reached
        self.rates["written"] *= self.rates["memory"] / self.usual["memory"]
        self.texts.append(f"memory at {reached / 1000:.3g} TB/s")

    def _add_products(self, dtype: str) -> None:
        rows, slowdown = self._of("gemm", dtype)
        rows = [row for row in rows if not row.case.startswith("square")] or rows
        peak = self.gpu.peak_tflops.get(dtype)
        if not rows or peak is None:
            return
        times = {_shape(row): row.time_s * slowdown - self._written(row) for row in rows}
        sms = self.gpu.sms or USUAL_SMS
        nominal = {each: _flops(each) * filled(sms, each.rows, each.columns) / peak / 1e12 for each in times}
        if too_fast := [each for each, seconds in times.items() if seconds <= 0]:
            shape = f"{too_fast[0].rows} x {too_fast[0].inner} x {too_fast[0].columns}"
            what = f"the matrix product {shape} took less time than writing its result to memory"
            raise UsageError(what, do="run 'llmb bench memory' and 'llmb bench gemm' again")
        mean = sum(times.values()) / sum(nominal.values())
        self.rates[dtype] = mean
        self.products |= {each: times[each] / nominal[each] / mean for each in times}
        reached = sum(map(_flops, times)) / sum(row.time_s * slowdown for row in rows) / 1e12
        self.texts.append(f"{len(times)} products {dtype} at {reached:,.0f} TFLOP/s")

    def _written(self, row: Measurement) -> float:
        """Return the seconds that predictions add to a product for writing its result; 0 for logits."""
        if row.case.startswith("logits"):
            return 0.0
        shape = _shape(row)
        size = BF16 * shape.rows * shape.columns
        return size / self.gpu.memory_bandwidth_tb_s / 1e12 * self.rates["written"]

    def _add_attention(self, shapes: set[str]) -> None:
        rows, slowdown = self._of("attention", "bf16")
        of_shape: dict[str, list[Measurement]] = {}
        for row in rows:
            of_shape.setdefault(row.shape or "", []).append(row)
        both = {shape: group for shape, group in of_shape.items() if len(group) == len(("forward", "backward"))}
        rows = [row for shape, group in both.items() if shape in shapes for row in group]
        rows = rows or [row for group in both.values() for row in group]
        if not rows:
            return
        seconds = slowdown * sum(row.time_s for row in rows)
        reached = sum((row.tflops or 0.0) * row.time_s for row in rows) / seconds
        self.rates["attention"] = self.gpu.peak_tflops["bf16"] / reached
        self.texts.append(f"attention at {reached:,.0f} TFLOP/s")

    def _add_links(self) -> None:
        largest: dict[str, Measurement] = {}
        for row in self.rows:
            if self._shows_links(row):
                best = largest.setdefault(row.case, row)
                largest[row.case] = max(best, row, key=lambda each: (each.size_bytes or 0, -each.time_s))
        for case, row in largest.items():
            reached = row.bus_bandwidth_gb_per_s or 0.0
            self.links[KINDS.get(case, case)] = reached * 1e9
            self.texts.append(f"{case} at {reached:,.0f} GB/s")

    def _add_exchanges(self, plan: EnginePlan) -> None:
        """Add the times of all-to-all messages; predictions use a time only for equal sizes, ranks and nodes."""
        rows, layout = Sizes(plan).expert_rows() // plan.compute_path.dispatch_parts, plan.recipe.layout
        needed = layout.ep, BF16 * plan.recipe.model.hidden_size * rows // layout.etp
        for row in self.rows:
            place = OUT_OF_PLACE.fullmatch(row.shape or "")
            if row.case != "alltoall" or place is None:
                continue
            if place[1] and self.gpu.nvlink_domain_gpus > self.gpu.gpus_per_node:
                continue  # the nodes may be in one domain
            self.exchanges[row.ranks, int(place[1] or 1), row.size_bytes or 0] = row.time_s
            if (row.ranks, row.size_bytes) == needed:
                size = (row.size_bytes or 0) / MIB
                self.texts.append(f"exchange of {size:,.0f} MiB over {row.ranks} ranks in {1e3 * row.time_s:.3g} ms")

    def _shows_links(self, row: Measurement) -> bool:
        spans_nodes = "nodes" in (row.shape or "")
        within = 1 < row.ranks <= self.gpu.nvlink_domain_gpus
        within = within and not (spans_nodes and self.gpu.nvlink_domain_gpus <= self.gpu.gpus_per_node)
        return row.benchmark == "collectives" and within and (row.size_bytes or 0) >= LEAST_MESSAGE


def _case(row: Measurement) -> tuple[str, str | None]:
    return row.case, row.shape


def _shape(row: Measurement) -> ProductShape:
    rows, inner, columns = map(int, (row.shape or "").split(" x "))
    return ProductShape(row.dtype or "", _PASSES[row.case.rpartition("_")[2]], rows, inner, columns)


def _flops(shape: ProductShape) -> float:
    return 2.0 * shape.rows * shape.inner * shape.columns
