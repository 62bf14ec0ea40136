# SPDX-License-Identifier: Apache-2.0
"""Finds other work on a run's nodes between the samples around the window, which may be too short for one."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

from llmb.base.missing import Missing
from llmb.base.record import Record, Threshold
from llmb.catalogue.data_files import read_file
from llmb.readers.samples.sample_records import NodeOtherWork, OtherRun, OtherWork, Sample
from llmb.readers.samples.samples import Sampled, TimeSpan

DATA = Path(__file__).with_name("other_work.yaml")
NOT_SAMPLED = Missing("too little time was sampled around the window")
HIDDEN = "the kernel does not show the processes of the run"
NO_STEAL = "the kernel does not report it"
NO_LIMIT = "the run has no CPU limit"
NO_GPUS = "the GPUs' processes are unknown"
Device = Literal["cpu", "cuda"]


class OtherWorkRules(Record):
    """The content of ``other_work.yaml``."""

    other_cores_pct: dict[Device, Threshold]
    stolen_cores_pct: Threshold
    least_sampled_s: Threshold


@cache
def rules() -> OtherWorkRules:
    return read_file(DATA, OtherWorkRules)


def find_other_work(
    sampled: Sequence[Sampled],
    spans: Sequence[TimeSpan],
    device: Device,
    gpus: Mapping[str, Collection[str]] | None = None,
) -> OtherWork | Missing:
    """Find other work on nodes and their ``gpus`` (ids by node; None for all); Missing if too little was sampled."""
    begin_s, end_s = min(span.begin_s for span in spans), max(span.end_s for span in spans)
    wider_s = max(0.0, rules().least_sampled_s.value - (end_s - begin_s) / 2)
    window = TimeSpan(begin_s - wider_s, end_s + wider_s)
    longest: dict[str, tuple[Sampled, tuple[Sample, ...]]] = {}
    for one in sampled:
        # From the last sample before the window, or the first, to the first one after it, or the last.
        samples = one.samples
        before = [place for place, sample in enumerate(samples) if sample.time_s <= window.begin_s]
        after = [place for place, sample in enumerate(samples) if sample.time_s >= window.end_s]
        part = tuple(samples[before[-1] if before else 0 : after[0] + 1 if after else len(samples)])
        outside = not part or part[-1].time_s <= window.begin_s or part[0].time_s >= window.end_s
        around = () if outside else part
        if _lasted(around) > _lasted(longest.get(one.start.node, (one, ()))[1]):
            longest[one.start.node] = one, around
    long_enough = {
        node: pair for node, pair in sorted(longest.items()) if _lasted(pair[1]) >= rules().least_sampled_s.value
    }
    if not long_enough:
        return NOT_SAMPLED
    nodes = tuple(_of_node(one, around, gpus) for one, around in long_enough.values())
    return OtherWork(disturbing=tuple(_disturbing(nodes, device)), nodes=nodes)


def run_text(run: OtherRun) -> str:
    """Return a string such as ``llmb.engine.worker in .../exp_1730000000, since 14:03:00``, in local time."""
    where = f"in .../{Path(run.folder).parent.name}" if run.folder else f"(process {run.pid})"
    if run.since_s is None:
        return f"{run.program} {where}"
    return f"{run.program} {where}, since {datetime.fromtimestamp(run.since_s, UTC).astimezone():%H:%M:%S}"


def _lasted(samples: Sequence[Sample]) -> float:
    return samples[-1].time_s - samples[0].time_s if samples else 0.0


def _of_node(one: Sampled, around: Sequence[Sample], gpus: Mapping[str, Collection[str]] | None) -> NodeOtherWork:
    start, seconds = one.start, _lasted(around)

    def cores(value: Callable[[Sample], float | None]) -> float | None:
        first, last = value(around[0]), value(around[-1])
        return None if first is None or last is None else max(0.0, last - first) / seconds

    used, by_run = cores(lambda sample: sample.host.cpu_used_s), cores(lambda sample: sample.host.run_cpu_s)
    looked = [run for sample in around for run in sample.runs]
    runs = {(run.program, run.folder, run.pid if run.folder is None else None): run for run in looked}
    values = {
        "cores": start.cores,
        "other_cores": None if used is None or by_run is None else max(0.0, used - by_run),
        "run_cores": by_run,
        "stolen_cores": cores(lambda sample: sample.host.cpu_steal_s),
        "cpu_limit_cores": start.cpu_limit_cores,
        "throttled_cores": cores(lambda sample: sample.host.cpu_throttled_s),
        "load_before": one.samples[0].host.load,
        "runs": tuple(runs.values()),
        "gpu_processes": _gpu_processes(one, around, None if gpus is None else gpus.get(start.node, ())),
    }
    why = {"cpu_limit_cores": NO_LIMIT, "throttled_cores": NO_LIMIT, "gpu_processes": NO_GPUS}
    why |= {"other_cores": HIDDEN, "run_cores": HIDDEN}
    if "gpus" in start.missing:
        why["gpu_processes"] = start.missing["gpus"]
    reasons = {name: why.get(name, NO_STEAL) for name, value in values.items() if value is None}
    return NodeOtherWork.model_validate({"node": start.node, "sampled_s": seconds, **values, "reasons": reasons})


def _gpu_processes(
    one: Sampled, around: Sequence[Sample], gpus: Collection[str] | None
) -> dict[str, tuple[int, ...]] | None:
    others: dict[str, set[int]] = {}
    for sample in around:
        for gpu, pids in zip(one.start.gpus, sample.gpus.other_pids if sample.gpus else (), strict=False):
            if pids is not None and (gpus is None or gpu.uuid in gpus):
                others.setdefault(gpu.uuid, set()).update(pids)
    return {uuid: tuple(sorted(pids)) for uuid, pids in others.items()} or None


def _disturbing(nodes: Sequence[NodeOtherWork], device: Device) -> Iterator[str]:
    """Yield a text for each disturbance, without the programs and folders of other runs."""
    for node in nodes:
        on = f" on {node.node}" if len(nodes) > 1 else ""
        if _is_more(node.other_cores, node.cores, rules().other_cores_pct[device]):
            yield f"other processes{on} used {node.other_cores:.1f} of {node.cores} cores"
        elif node.runs:  # otherwise their cores are among those of the processes above
            yield f"another run{on}" if len(node.runs) == 1 else f"{len(node.runs)} other runs{on}"
        if _is_more(node.stolen_cores, node.cores, rules().stolen_cores_pct):
            yield f"other virtual machines{on} took {node.stolen_cores:.2f} of {node.cores} cores"
        pids = sorted({pid for each in (node.gpu_processes or {}).values() for pid in each})
        if pids:
            yield f"other processes{on} on the run's GPUs: {len(pids)}"


def _is_more(used: float | None, cores: int | None, threshold: Threshold) -> bool:
    return used is not None and bool(cores) and 100 * used / (cores or 1) >= threshold.value
