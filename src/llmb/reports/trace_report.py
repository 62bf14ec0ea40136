# SPDX-License-Identifier: Apache-2.0
"""Step times by activity, and NCCL's collectives, test results and network, as tables, JSON and a picture."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from html import escape
from typing import Any

from llmb.base.shown_text import counted, listed, printable
from llmb.readers.nccl.nccl_network import Network, NodesNetwork
from llmb.readers.nccl.nccl_summary import Collective, NcclSummary
from llmb.readers.nccl.nccl_tests import Bandwidth, TestRow, TestTable, same_tests
from llmb.readers.profiles.breakdown import RankTrace, StepBreakdown, TraceSummary, shares
from llmb.readers.profiles.timeline import NameTime
from llmb.reports.formats import crop, number, whole
from llmb.reports.table import Column, Table, fields_of, getter, numbers, rows_table, table_of, texts

PLACES = ("out_of_place", "in_place")
MOST_ROWS = 40
MIB = 2**20


def nccl_document(
    summary: NcclSummary | None, tests: Sequence[TestTable], network: Network | None = None
) -> dict[str, Any]:
    """Return the JSON of NCCL's logs and tests; ``log`` is null without calls, ``network`` without lines about it."""
    return {"network": network, "log": summary, "tests": tests}


def nccl_tables(
    summary: NcclSummary | None, tests: Sequence[TestTable], network: Network | None = None
) -> Iterator[Table]:
    if network:
        yield network_table(network)
    if summary:
        yield _nccl_collectives_table(summary)
        if summary.steps:
            traffic = [*numbers("calls per rank: calls_per_rank"), *numbers("MiB per rank: bytes_per_rank", form=_mib)]
            yield table_of("By step", summary.steps, [*numbers("step", form=str), *traffic])
    for group in same_tests(tests):
        places = [place for place in PLACES if all(getattr(row, place) for test in group for row in test.rows)]
        if len(group) > 1 and places:
            yield _comparison(group, places[0])
        else:
            yield from map(_test_table, group)


def _nccl_collectives_table(summary: NcclSummary) -> Table:
    columns: list[Column[Collective]] = [
        *texts("operation", "datatype"),
        *numbers("ranks", form=str),
        Column("communicators", _communicators, str, right=True),
        Column("count", _count, str, right=True),
        *numbers("MiB per call: bytes_per_call", form=_mib),
        *numbers("calls per rank: calls_per_rank"),
        *numbers("MiB per rank: bytes_per_rank", form=_mib),
    ]
    title = f"Collectives: {summary.calls:,} calls of {summary.logged_ranks} ranks"
    hidden = len(summary.collectives) - MOST_ROWS
    notes = [f"left out: {counted(hidden, 'smaller row')}, see --json."] if hidden > 0 else []
    if summary.coarse:
        notes.append("There are too many sizes; they are grouped by powers of two.")
    if any(row.communicators_from == "number of ranks" for row in summary.collectives):
        notes.append("~ assumes that the log is of all ranks of each communicator.")
    notes += (f"{printable(note)}." for note in summary.notes)
    return table_of(title, summary.collectives[:MOST_ROWS], columns, caption=notes)


def _communicators(row: Collective) -> str:
    if row.communicators is None:
        return "n/a"
    return f"{'~' if row.communicators_from == 'number of ranks' else ''}{row.communicators}"


def _count(row: Collective) -> str:
    return f"{row.count:,}" if row.count is not None else f"{row.count_least:,}-{row.count_most:,}"


def _mib(size: float | None) -> str:
    return "n/a" if size is None else number(size / MIB)


def _test_table(test: TestTable) -> Table:
    time = {"CPU time us": "cpu_time_us"} if test.is_of_cpu_time else {"time us": "time_us"}
    figures = {**time, "algbw GB/s": "algorithm_gb_s", "busbw GB/s": "bus_gb_s", "wrong": "wrong"}
    columns: list[Column[TestRow]] = [
        *numbers("bytes: size_bytes", form=whole),
        *texts("type: datatype", "redop: reduction"),
        *(numbers(f"{header}: out_of_place", form=partial(_figure, name))[0] for header, name in figures.items()),
        *(numbers(f"{header} : in_place", form=partial(_figure, name))[0] for header, name in figures.items()),
    ]
    ranks = f" on {test.ranks} ranks" if test.ranks else ""
    average = test.not_finite.get("average_bus_gb_s", number(test.average_bus_gb_s))
    notes = [f"Left: out of place, right: in place. Average bus bandwidth: {printable(average)} GB/s."]
    notes += [f"Wrong results in {counted(_wrong_rows(test), 'row')}."] if _wrong_rows(test) else []
    notes += ["Times and bandwidths are of the host, not of the GPU."] if test.is_of_cpu_time else []
    notes += [f"Contradiction: {test.contradiction}."] if test.contradiction else []
    title = f"{test.name or 'nccl-tests'}{ranks}, {test.source}"
    return table_of(title, test.rows, columns, caption=" ".join(notes))


def _figure(name: str, way: Bandwidth | None) -> str:
    return "n/a" if way is None else printable(way.not_finite.get(name, number(getattr(way, name))))


def _comparison(tests: Sequence[TestTable], place: str) -> Table:
    """Return a table of the bus bandwidth at equal sizes in several files, with the ratio to the first file."""
    sources = [test.source for test in tests]
    right = ("bytes", *sources, *(f"{source} / first" for source in sources[1:]))
    title = f"{tests[0].name}: bus bandwidth in GB/s, {place.replace('_', ' ')}"
    bandwidth, rows = getter(f"{place}.bus_gb_s"), []
    by_key = [{(row.size_bytes, row.datatype, row.reduction): row for row in test.rows} for test in tests]
    for key in sorted({key for rows_of in by_key for key in rows_of}, key=lambda key: (key[1], key[2] or "", key[0])):
        values = [bandwidth(rows_of.get(key)) for rows_of in by_key]
        ratios = [value / values[0] if value is not None and values[0] else None for value in values[1:]]
        rows.append((f"{key[0]:,}", key[1], key[2] or "", *map(number, values), *map(number, ratios)))
    averages = ", ".join(f"{test.source} {number(test.average_bus_gb_s)}" for test in tests)
    wrong = [test.source for test in tests if _wrong_rows(test)]
    notes = [f"Average bus bandwidth, GB/s: {averages}."]
    if wrong:
        notes.append(f"Wrong results in {', '.join(wrong)}.")
    notes += (f"Contradiction in {one.source}: {one.contradiction}." for one in tests if one.contradiction)
    if len({test.ranks for test in tests} - {None}) > 1:
        notes.append(f"Ranks: {', '.join(f'{test.source} {number(test.ranks)}' for test in tests)}.")
    return rows_table(title, ("bytes", "type", "redop", *right[1:]), rows, right=right, caption=" ".join(notes))


def _wrong_rows(test: TestTable) -> int:
    return sum(any(way and way.wrong for way in (row.out_of_place, row.in_place)) for row in test.rows)


PART_NAMES = {
    "attention": "attention",
    "matrix_product": "matrix products",
    "other": "other kernels",
    "unclassified": "unclassified kernels",
    "cuda_graph": "CUDA graphs, not split",
    "memory_copy": "memory copies",
    "communication_exposed": "communication, exposed",
    "idle": "idle",
}
RARE_PARTS = ("unclassified", "cuda_graph")
"""Parts that are hidden if they are 0."""
LONGEST_NAME = 90
MOST_NOTES = 5
COLORS = {
    "attention": "#0072b2",
    "matrix_product": "#009e73",
    "other": "#e69f00",
    "unclassified": "#f0e442",
    "cuda_graph": "#56b4e9",
    "memory_copy": "#cc79a7",
    "communication_exposed": "#d55e00",
    "idle": "#dddddd",
}
"""Colors that colorblind people can distinguish: https://jfly.uni-koeln.de/color/ (Okabe and Ito)."""
WHITE_ON = ("attention", "matrix_product", "communication_exposed")
"""Parts with a dark color, on which labels are white."""
HIDDEN_COLOR = "#d55e00"
HIDDEN_LEGEND = ("communication, hidden", HIDDEN_COLOR, 4)
WIDTH, LEFT, RIGHT = 1000, 190, 90
ROW, BAR, HIDDEN, TOP, BOTTOM = 30, 16, 4, 96, 20
NARROWEST_LABEL = 34
TICKS = 5
CHARACTERS = 24


def trace_document(summary: TraceSummary) -> dict[str, Any]:
    """Return the JSON of a trace; values missing from the trace are null."""
    return {
        "ranks": [
            {
                **fields_of(rank, "source", "rank", "device"),
                "steps": [step_document(step) for step in rank.steps],
                "longest": [_name_document(item) for item in rank.names],
                "unclassified": [_name_document(item) for item in rank.unclassified],
                "notes": rank.notes,
            }
            for rank in summary.ranks
        ],
        "slowest_rank": summary.slowest,
    }


def _name_document(item: NameTime) -> dict[str, Any]:
    return {**fields_of(item, "name", "activity", "calls"), "total_s": item.total_ns / 1e9}


def step_document(step: StepBreakdown) -> dict[str, Any]:
    values = asdict(step)
    del values["rank"]
    return {**values, "shares": shares(step)}


def trace_tables(summary: TraceSummary) -> Iterator[Table]:
    """Yield tables of steps, collectives, the longest kernels of the first rank, and the unclassified kernels of the
    rank that spent the most time in them."""
    yield _steps_table(summary)
    if any(step.collectives for rank in summary.ranks for step in rank.steps):
        yield _collectives_table(summary)
    first = summary.ranks[0]
    yield _names_table(f"Longest {_what(first)}s of {printable(first.label)}, all steps", first, first.names)
    unknown = max(summary.ranks, key=lambda rank: sum(item.total_ns for item in rank.unclassified))
    if unknown.unclassified:
        title = f"Unclassified {_what(unknown)}s of {printable(unknown.label)}, all steps"
        caption = "No rule of llmb matches their names, so their activity is unknown."
        yield _names_table(title, unknown, unknown.unclassified, caption)


def shown_parts(steps: Iterable[StepBreakdown]) -> dict[str, str]:
    """Return the names of the parts of ``steps`` to show: all, except rare ones that are 0 in every step."""
    whole = list(steps)
    return {
        part: name
        for part, name in PART_NAMES.items()
        if part not in RARE_PARTS or any(getattr(step, f"{part}_s") for step in whole)
    }


def _steps_table(summary: TraceSummary) -> Table:
    rows = [(rank, step, shares(step)) for rank in summary.ranks for step in rank.steps]
    parts = shown_parts(step for _, step, _ in rows)
    columns = [
        *texts("rank: 0.label"),
        *numbers("step: 1.step", form=str),
        *numbers("ms: 1.duration_s", form=_ms),
        *numbers(*(f"{name} %: 2.{part}" for part, name in parts.items()), form=lambda share: f"{100 * share:.1f}"),
        *numbers("hidden communication ms: 1.communication_hidden_s", form=_ms, drop=2),
        *numbers("longest idle ms: 1.idle_longest_s", form=_ms, drop=1),
    ]
    notes = [f"{printable(rank.label)}: {printable(note)}." for rank in summary.ranks for note in rank.notes]
    more = len(notes) - MOST_NOTES
    notes = notes[:MOST_NOTES] + ([f"{counted(more, 'more note')}, see --json."] if more > 0 else [])
    if slowest := summary.slowest:
        text = "Slowest: {}, {} ms per step without exposed communication; the others {} ms (median).".format
        notes.insert(0, text(printable(slowest.label), _ms(slowest.local_s), _ms(slowest.others_local_s)))
    return table_of("Where the time of each step went", rows, columns, caption=notes)


def _ms(seconds: float) -> str:
    return number(1e3 * seconds)


def _collectives_table(summary: TraceSummary) -> Table:
    rows = ((rank.label, rank.typical.step, item) for rank in summary.ranks for item in rank.typical.collectives)
    columns = [
        *texts("rank: 0"),
        *numbers("step: 1", form=str),
        *texts("collective: 2.kind"),
        *texts("group: 2.group", form=lambda group: printable(group or "n/a (not in the trace)")),
        *numbers("calls: 2.calls", form=str),
        *numbers("total ms: 2.total_s", "exposed ms: 2.exposed_s", "hidden ms: 2.hidden_s", form=_ms),
    ]
    return table_of("Communication in each rank's step of median length", rows, columns)


def _what(rank: RankTrace) -> str:
    return "kernel" if rank.device == "gpu" else "operator"


def _names_table(title: str, rank: RankTrace, names: Iterable[NameTime], caption: str = "") -> Table:
    columns = [
        *texts(f"{_what(rank)}: name", form=lambda name: printable(crop(name, LONGEST_NAME))),
        *texts("kind: activity.value", form=lambda kind: kind.replace("_", " ")),
        *numbers("calls", form=str),
        *numbers("ms: total_ns", form=lambda ns: number(ns / 1e6)),
        *numbers("ms per step: total_ns", form=lambda ns: number(ns / 1e6 / len(rank.steps))),
    ]
    return table_of(title, names, columns, caption=caption)


def trace_picture(summary: TraceSummary) -> str:
    """Draw one bar per step and rank on a common scale as SVG, with a thin bar below for hidden communication."""
    rows = [(printable(rank.label), step) for rank in summary.ranks for step in rank.steps]
    parts = shown_parts(step for _, step in rows)
    longest = max(step.duration_s for _, step in rows)
    height = TOP + ROW * len(rows) + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="20" y="26" font-size="16" font-weight="bold">Where the time of each step went</text>',
        *_legend(parts),
        *_axis(longest, height - BOTTOM),
    ]
    for index, (label, step) in enumerate(rows):
        lines += _bar(label, step, parts, longest, TOP + ROW * index)
    return "\n".join([*lines, "</svg>", ""])


def _length(seconds: float, longest: float) -> float:
    return (WIDTH - LEFT - RIGHT) * seconds / longest if longest else 0.0


def _legend(parts: Mapping[str, str]) -> Iterator[str]:
    x, y = 20.0, 38
    for name, color, height in (*((name, COLORS[part], 12) for part, name in parts.items()), HIDDEN_LEGEND):
        width = 36 + 6.9 * len(name)
        if x + width > WIDTH:
            x, y = 20.0, y + 18
        yield f'<rect x="{x:.1f}" y="{y + 6 - height // 2}" width="12" height="{height}" fill="{color}"/>'
        yield f'<text x="{x + 17:.1f}" y="{y + 10}">{name}</text>'
        x += width


def _axis(longest: float, bottom: float) -> Iterator[str]:
    for tick in range(TICKS + 1):
        seconds = longest * tick / TICKS
        x = LEFT + _length(seconds, longest)
        yield f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#eeeeee"/>'
        yield f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle" fill="#666666">{number(1e3 * seconds)}</text>'
    yield f'<text x="{LEFT - 12}" y="{TOP - 14}" text-anchor="end" fill="#666666">milliseconds</text>'


def _bar(label: str, step: StepBreakdown, parts: Mapping[str, str], longest: float, y: float) -> Iterator[str]:
    short = label if len(label) <= CHARACTERS else f"{label[: CHARACTERS - 1]}…"
    yield f'<text x="{LEFT - 12}" y="{y + 12}" text-anchor="end">{escape(short)}, step {step.step}</text>'
    x = float(LEFT)
    for part, name in parts.items():
        seconds = getattr(step, f"{part}_s")
        width = _length(seconds, longest)
        share = f"{100 * seconds / step.duration_s:.1f} %" if step.duration_s else ""
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{COLORS[part]}">'
            f"<title>{name}: {number(1e3 * seconds)} ms, {share}</title></rect>"
        )
        if width >= NARROWEST_LABEL:
            color = "#ffffff" if part in WHITE_ON else "#222222"
            text = f"{100 * seconds / step.duration_s:.0f} %"
            yield f'<text x="{x + width / 2:.2f}" y="{y + 12}" text-anchor="middle" fill="{color}">{text}</text>'
        x += width
    hidden = _length(step.communication_hidden_s, longest)
    yield f'<rect x="{LEFT}" y="{y + BAR + 1}" width="{hidden:.2f}" height="{HIDDEN}" fill="{HIDDEN_COLOR}"/>'
    yield f'<text x="{x + 6:.2f}" y="{y + 12}">{number(1e3 * step.duration_s)} ms</text>'


MOST_NAMED = 8
"""The maximum number of nodes and devices to name in a row."""


def network_text(network: Network) -> str:
    """Format a network as ``InfiniBand, 8 devices, GPUDirect RDMA, NVLS, 16 channels; NCCL 2.28.9``."""
    devices = network.nodes[0].devices
    parts = [
        " and ".join(network.used),
        counted(len(devices), "device") if devices else "",
        {True: "GPUDirect RDMA", False: "no GPUDirect RDMA", None: ""}[network.gpudirect],
        "NVLS" if network.nvls else "",
        "CollNet" if network.collnet else "",
        f"{network.channels.collective} channels" if network.channels else "",
    ]
    version = f"; NCCL {network.nccl_version}" if network.nccl_version else ""
    return ", ".join(filter(None, parts)) + version


def network_table(network: Network) -> Table:
    """Return a table with one row per property; properties of nodes have one row per group of equal nodes."""
    rows = []
    plugin = " ".join(filter(None, (network.plugin, network.plugin_version)))
    for name, text, key in (
        ("NCCL", network.nccl_version, "nccl_version"),
        ("plugin", plugin, "plugin"),
        ("NVLS", _yes(network.nvls), "nvls"),
        ("NVLink between nodes", _yes(network.mnnvl), "mnnvl"),
        ("CollNet", _yes(network.collnet), "collnet"),
        ("channels", _channels(network), "channels"),
    ):
        rows.append((name, text or "n/a", "" if text else network.reasons.get(key, "")))
    for nodes in network.nodes:
        where = _list(nodes.nodes)
        for name, text, key in _node_rows(nodes):
            rows.append((name, text or "n/a", where if text else f"{where}: {network.reasons.get(key, '')}"))
    unread = f"{counted(network.unread_lines, 'line')} ignored, because the name of the writing process is unreadable."
    return rows_table("Network", ("what", "value", "note"), rows, caption=unread if network.unread_lines else "")


def _node_rows(nodes: NodesNetwork) -> Iterator[tuple[str, str | None, str]]:
    yield "fabric", nodes.fabric, "fabric"
    yield "transport", nodes.transport, "transport"
    yield "GPUDirect RDMA", _yes(nodes.gpudirect), "gpudirect"
    for key in ("devices", "devices_used", "idle_devices"):
        devices: tuple[str, ...] | None = getattr(nodes, key)
        yield key.replace("_", " "), None if devices is None else _list(devices) or "none", key


def _channels(network: Network) -> str | None:
    if network.channels is None:
        return None
    kinds = (
        (network.channels.collective, "collective"),
        (network.channels.nvls, "NVLS"),
        (network.channels.point_to_point, "point-to-point"),
    )
    return ", ".join(f"{count} {name}" for count, name in kinds if count is not None)


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _list(names: tuple[str, ...]) -> str:
    return listed(names, MOST_NAMED)
