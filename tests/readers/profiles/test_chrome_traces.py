# SPDX-License-Identifier: Apache-2.0
"""Traces of the PyTorch profiler, made by hand so that every number is known, and the arithmetic of intervals."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.readers.profiles import chrome
from llmb.readers.profiles.breakdown import PARTS, StepBreakdown, break_down, shares, summarize
from llmb.readers.profiles.chrome import read_chrome
from llmb.readers.profiles.classify import Activity, Rules
from llmb.readers.profiles.timeline import clip, intersect, subtract, total, union
from llmb.readers.profiles.trace_files import find_traces, read_trace, read_traces

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FLASH = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(flash::Flash_fwd_params)"


def microseconds(step: StepBreakdown) -> dict[str, float]:
    return {part.removesuffix("_s"): round(1e6 * getattr(step, part), 3) for part in (*PARTS, "communication_hidden_s")}


@pytest.fixture
def gpu_trace(write_trace: Callable[..., Path], span: Callable[..., dict]) -> Path:
    """A step from 100 to 200 us on two streams, and a step from 200 to 260."""
    group = {"Collective name": "allreduce", "Process Group Name": "7", "Process Group Description": "mesh_tp"}
    return write_trace(
        [
            span("user_annotation", "ProfilerStep#45", 100, 200),
            span("user_annotation", "ProfilerStep#46", 200, 260),
            span("cpu_op", "aten::mm", 100, 190),
            span("kernel", "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", 110, 140, tid=7),
            span("kernel", FLASH, 135, 150, tid=8),
            span("kernel", "void at::native::vectorized_elementwise_kernel<4>(int)", 150, 160, tid=7),
            span("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 158, 165, tid=8),
            span("kernel", ALL_REDUCE, 145, 185, tid=20, **group),
            span("kernel", ALL_REDUCE, 190, 195, tid=20, **{**group, "Process Group Description": "undefined"}),
            span("kernel", ALL_REDUCE, 240, 250, tid=20, **group),
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        ],
        rank=3,
    )


def test_an_instant_counts_once_and_the_parts_add_up(gpu_trace: Path) -> None:
    timeline = read_chrome(gpu_trace, Rules())
    first, second = break_down(timeline)
    assert (timeline.rank, timeline.device, first.step, second.step) == (3, "gpu", 45, 46)
    assert microseconds(first) == {
        "attention": 15,  # 135-150, also where the product runs beside it
        "matrix_product": 25,  # 110-135
        "other": 10,  # 150-160
        "unclassified": 0,
        "cuda_graph": 0,
        "memory_copy": 5,  # 160-165; before, a kernel runs beside it
        "communication_exposed": 25,  # 165-185 and 190-195
        "idle": 20,  # 100-110, 185-190, 195-200
        "communication_hidden": 20,  # 145-165
    }
    assert first.idle_longest_s == pytest.approx(10e-6)
    assert sum(getattr(first, part) for part in PARTS) == pytest.approx(first.duration_s, abs=1e-12)
    assert sum(shares(first).values()) == pytest.approx(1)
    assert microseconds(second) == dict.fromkeys(microseconds(second), 0) | {"communication_exposed": 10, "idle": 50}


def test_communication_is_told_by_kind_and_group(gpu_trace: Path) -> None:
    first, _ = break_down(read_chrome(gpu_trace, Rules()))
    found = [
        (item.kind, item.group, item.calls, round(1e6 * item.total_s), round(1e6 * item.exposed_s))
        for item in first.collectives
    ]
    assert found == [("all_reduce", "mesh_tp", 1, 40, 20), ("all_reduce", "7", 1, 5, 5)]
    assert [round(1e6 * item.hidden_s) for item in first.collectives] == [20, 0]


def test_very_many_groups_are_one(
    write_trace: Callable[..., Path], span: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome, "MOST_GROUPS", 2)
    calls = [span("kernel", ALL_REDUCE, at, at + 1, **{"Process Group Name": str(at)}) for at in range(10)]
    path = write_trace([span("user_annotation", "ProfilerStep#1", 0, 10), *calls])
    (step,) = break_down(read_chrome(path, Rules()))
    found = {item.group: item.calls for item in step.collectives}
    assert found == {"0": 1, "1": 1, chrome.MORE_GROUPS: 8}


def test_kernels_are_named_by_their_time(gpu_trace: Path) -> None:
    names = read_chrome(gpu_trace, Rules()).names
    assert [(item.activity, item.calls, item.total_ns) for item in names[:2]] == [
        (Activity.COMMUNICATION, 3, 55_000),
        (Activity.MATRIX_PRODUCT, 1, 30_000),
    ]


def test_a_host_that_runs_ahead_does_not_move_steps(
    write_trace: Callable[..., Path], span: Callable[..., dict]
) -> None:
    """The host launches step 1 while the GPU is still at step 0: the GPU's own ranges say where that one ends."""
    path = write_trace(
        [
            span("user_annotation", "ProfilerStep#0", 0, 20),
            span("user_annotation", "ProfilerStep#1", 20, 40),
            span("gpu_user_annotation", "ProfilerStep#0", 5, 100, tid=7),
            span("gpu_user_annotation", "ProfilerStep#1", 100, 190, tid=7),
            span("kernel", "some_gemm", 5, 100, tid=7),
            span("kernel", "some_gemm", 100, 190, tid=7),
        ]
    )
    steps = read_chrome(path, Rules()).steps
    assert [(step.start, step.end) for step in steps] == [(0, 100_000), (100_000, 190_000)]


def test_operators_of_a_cpu_count_once(write_trace: Callable[..., Path], span: Callable[..., dict]) -> None:
    path = write_trace(
        [
            span("user_annotation", "ProfilerStep#3", 0, 100),
            span("user_annotation", "Optimizer.step#AdamW.step", 0, 100),
            span("cpu_op", "aten::linear", 0, 20),
            span("cpu_op", "aten::t", 1, 2),
            span("cpu_op", "aten::addmm", 2, 18),
            span("cpu_op", "aten::scaled_dot_product_attention", 20, 50),
            span("cpu_op", "aten::bmm", 25, 45),
            span("cpu_op", "autograd::engine::evaluate_function: AddBackward0", 50, 90),
            span("cpu_op", "AddBackward0", 50, 90),
            span("cpu_op", "aten::copy_", 80, 85),
            span("user_annotation", "gloo:all_reduce", 40, 82, tid=2),
        ]
    )
    (step,) = break_down(read_chrome(path, Rules()))
    assert microseconds(step) == {
        "attention": 30,  # the product within belongs to it
        "matrix_product": 16,
        "other": 4,  # aten::linear around the product
        "unclassified": 0,
        "cuda_graph": 0,
        "memory_copy": 5,
        "communication_exposed": 30,  # 50-80; a node of the graph that waits hides nothing
        "idle": 15,  # 85-100
        "communication_hidden": 12,  # 40-50 and 80-82
    }
    assert [(item.kind, item.calls) for item in step.collectives] == [("all_reduce", 1)]


def test_the_slowest_rank_is_the_one_that_others_wait_for(
    write_trace: Callable[..., Path], span: Callable[..., dict]
) -> None:
    for rank, compute in enumerate((30, 80, 40)):
        write_trace(
            [
                span("user_annotation", "ProfilerStep#1", 0, 100),
                span("kernel", "a_gemm", 0, compute),
                span("kernel", ALL_REDUCE, compute, 100),
            ],
            name=f"rank-{rank}.json.gz",
        )
    traces = find_traces([write_trace([], name="ignored.txt").parent])
    assert [path.name for path in traces] == ["rank-0.json.gz", "rank-1.json.gz", "rank-2.json.gz"]
    summary = summarize(read_traces(traces))
    assert [rank.rank for rank in summary.ranks] == [0, 1, 2]
    assert summary.slowest
    assert summary.slowest.label == "rank 1"
    assert (summary.slowest.local_s, summary.slowest.others_local_s) == pytest.approx((80e-6, 35e-6))


def test_events_may_end_anywhere_in_a_chunk(gpu_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = break_down(read_chrome(gpu_trace, Rules()))
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(json.loads(gpu_trace.read_text())["traceEvents"], indent=1))
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr(chrome, "CHUNK_BYTES", size)
        assert break_down(read_chrome(gpu_trace, Rules())) == whole
        assert [step.duration_s for step in break_down(read_chrome(bare, Rules()))] == [100e-6, 60e-6]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"iteration 1/50", "is not JSON"),
        (b'{"steps": []}', "has no 'traceEvents'"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph', "is truncated within its events"),
        (b'{"traceEvents": [1, 2]}', "not JSON objects"),
        (b'{"traceEvents": [{"ph": "M"}, {"args": ' + b"[" * 200_000, "event 2"),
        (b'{"traceEvents": [{"ts": ' + b"9" * 10_000 + b"}]}", "cannot be read"),
        (b'{"a": ' + b"[" * 200_000 + b'"traceEvents": []', "not valid JSON"),
        (b"\xff\xfe{\x00}\x00", "is not JSON"),
        (b"\x1f\x8b\x08\x00broken", "cannot be decompressed"),
        (b"SQLite format 3\x00broken", "not an SQLite database that can be read"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as raised:
        read_trace(path, Rules())
    assert "Nsight Systems" in str(raised.value) or "nsys export" in str(raised.value)


def test_events_without_a_time_are_left_out_and_counted(
    write_trace: Callable[..., Path], span: Callable[..., dict]
) -> None:
    kernel = span("kernel", "a_gemm", 10, 20)
    odd: list[dict] = [{**kernel, "ts": value} for value in (None, "12", True, [], 1e300)]
    odd += [{key: value for key, value in kernel.items() if key != missing} for missing in ("ts", "dur")]
    odd += [{**kernel, "dur": -1}, {**kernel, "ts": float("nan")}, {**kernel, "dur": float("inf")}]
    elsewhere: list[dict] = [{"ph": "i", "name": "instant"}, {"ph": "X", "cat": ["kernel"], "name": {}}]
    path = write_trace([span("user_annotation", "ProfilerStep#1", 0, 100), kernel, *odd, *elsewhere])
    (timeline,) = read_trace(path, Rules())
    assert timeline.notes == (f"left out: {len(odd)} events without a valid time",)
    (step,) = break_down(timeline)
    assert microseconds(step)["matrix_product"] == 10


@pytest.mark.parametrize("rank", ["3", "worker-3", None, -1, 1.5, True, {}])
def test_a_rank_that_is_no_number_is_not_guessed(
    write_trace: Callable[..., Path], span: Callable[..., dict], rank: object
) -> None:
    path = write_trace([span("user_annotation", "ProfilerStep#1", 0, 100)], name="rank-7.json", rank=rank)
    (timeline,) = read_trace(path, Rules())
    assert timeline.rank == 7  # of the file's name
    assert [str(rank) in note for note in timeline.notes] == ([] if rank is None else [True])


def test_several_gpus_or_steps_are_not_counted_as_one(
    write_trace: Callable[..., Path], span: Callable[..., dict]
) -> None:
    step = span("user_annotation", "ProfilerStep#1", 0, 100)
    kernels = [span("kernel", "gemm", 10 + 50 * device, 20 + 50 * device, device=device) for device in (0, 1)]
    with pytest.raises(UsageError, match="one process has kernels on several GPUs"):
        read_chrome(write_trace([step, *kernels]), Rules())
    with pytest.raises(UsageError, match="step 1 is marked several times"):
        read_chrome(write_trace([step, kernels[0], {**step, "pid": 9}]), Rules())


def test_odd_arguments_and_threads_of_events(write_trace: Callable[..., Path], span: Callable[..., dict]) -> None:
    step = span("user_annotation", "ProfilerStep#1", 0, 100)
    reduce = [
        {**span("kernel", ALL_REDUCE, 10, 20), "args": args} for args in (None, [], "text", {"Collective name": 1})
    ]
    assert read_trace(write_trace([step, *reduce]), Rules())[0].steps
    operator = {**span("cpu_op", "aten::mm", 10, 20), "tid": {"a": []}, "pid": None}
    assert read_trace(write_trace([step, operator], name="cpu.json"), Rules())[0].steps


def test_a_byte_order_mark_is_skipped(gpu_trace: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + gpu_trace.read_bytes())
    assert break_down(read_chrome(marked, Rules())) == break_down(read_chrome(gpu_trace, Rules()))


def test_steps_without_a_duration_are_left_out(write_trace: Callable[..., Path], span: Callable[..., dict]) -> None:
    steps = [span("user_annotation", "ProfilerStep#1", 5, 5), span("user_annotation", "ProfilerStep#2", 5, 9)]
    (timeline,) = read_trace(write_trace(steps), Rules())
    assert [step.number for step in timeline.steps] == [2]
    assert timeline.notes == ("left out: 1 step without a duration",)


def test_an_unfinished_event_is_not_parsed_anew_with_each_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome, "CHUNK_BYTES", 1000)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"name": "' + "x" * 4_000_000)
    tries = 0
    decode = json.JSONDecoder.raw_decode

    def counted(self: json.JSONDecoder, s: str, idx: int = 0) -> object:
        nonlocal tries
        tries += 1
        return decode(self, s, idx)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    with pytest.raises(UsageError, match=r"truncated within its events \(event 1\)"):
        read_trace(path, Rules())
    assert tries < 20


def test_deeply_nested_operators_take_linear_time(write_trace: Callable[..., Path], span: Callable[..., dict]) -> None:
    depth = 5_000
    events = [span("cpu_op", "aten::linear", place, 2 * depth - place) for place in range(depth)]
    path = write_trace([span("user_annotation", "ProfilerStep#1", 0, 2 * depth), *events])
    (step,) = break_down(read_trace(path, Rules())[0])
    assert step.other_s == pytest.approx(2 * depth * 1e-6)


def test_a_trace_without_steps_is_an_error(write_trace: Callable[..., Path], span: Callable[..., dict]) -> None:
    path = write_trace([span("kernel", "a_gemm", 0, 1)])
    with pytest.raises(UsageError, match="no training steps") as raised:
        read_trace(path, Rules())
    assert "ProfilerStep#N" in str(raised.value)


def test_iterations_without_marks_are_those_of_the_optimizer(
    write_trace: Callable[..., Path], span: Callable[..., dict]
) -> None:
    updates = [span("user_annotation", "Optimizer.step#AdamW.step", at, at + 10) for at in (90, 190, 290)]
    on_device = [span("gpu_user_annotation", "Optimizer.step#AdamW.step", at + 5, at + 25) for at in (90, 190, 290)]
    kernels = [span("kernel", "a_gemm", at, at + 60) for at in (20, 120, 220)]
    path = write_trace([*updates, *on_device, *kernels])
    (timeline,) = read_trace(path, Rules(), unmarked=True)
    assert [(step.number, step.start, step.end) for step in timeline.steps] == [
        (1, 100_000, 215_000),
        (2, 215_000, 315_000),
    ]
    assert timeline.notes == (
        "no step is marked: iterations are from the end of one 'Optimizer.step#AdamW.step' to that of the next",
    )


@pytest.mark.parametrize("category", ["kernel", "cpu_op"])
def test_a_trace_without_iterations_is_one_step(
    write_trace: Callable[..., Path], span: Callable[..., dict], category: str
) -> None:
    path = write_trace([span(category, "aten::mm", 10, 20), span(category, "aten::mm", 50, 70)])
    (timeline,) = read_trace(path, Rules(), unmarked=True)
    (step,) = break_down(timeline)
    assert (step.duration_s, step.idle_s) == (pytest.approx(60e-6), pytest.approx(30e-6))
    assert timeline.notes == ("no step is marked: the whole trace, 0.06 ms, is shown as step 0",)


def process(name: str, key: str = "name") -> dict:
    return {"ph": "M", "name": "process_name", "pid": 1, "args": {key: name}}


@pytest.mark.parametrize(
    ("category", "labels", "device"),
    [
        ("xpu_runtime", "", "XPU"),
        ("mtia_ccp_events", "", "MTIA"),
        ("hpu_op", "", "HPU"),
        ("privateuse1_runtime", "", "privateuse1"),
        ("Trace", "/device:TPU:0", "TPU"),
        ("Trace", "Ascend Hardware", "NPU"),
    ],
)
def test_a_device_that_is_unknown_is_no_cpu(
    write_trace: Callable[..., Path], span: Callable[..., dict], category: str, labels: str, device: str
) -> None:
    step, operator = span("user_annotation", "ProfilerStep#1", 0, 100), span("cpu_op", "aten::mm", 1, 9)
    events = [step, operator, span(category, "launch", 1, 2), process(labels, "labels")]
    with pytest.raises(UsageError, match=f"unknown device in the trace: .*{device}"):
        read_trace(write_trace(events), Rules())
    kernels = [*events, span("kernel", "some_kernel", 3, 9)]
    (timeline,) = read_trace(write_trace(kernels), Rules())
    assert timeline.device == "gpu" and device in timeline.notes[0]


def test_operators_beside_kernels_that_were_not_recorded_are_said_to_be_of_the_cpu(
    write_trace: Callable[..., Path], span: Callable[..., dict]
) -> None:
    step, operator = span("user_annotation", "ProfilerStep#1", 0, 100), span("cpu_op", "aten::mm", 1, 9)
    (timeline,) = read_trace(write_trace([step, operator, span("cuda_runtime", "cudaLaunchKernel", 1, 2)]), Rules())
    assert timeline.notes == ("the GPU's kernels were not recorded: these are operators on the CPU",)


def launched(
    span: Callable[..., dict], steps: int, dropped: Callable[[int, int], bool], kernels: int = 9
) -> list[dict]:
    """Steps of 1 ms in which a kernel in ten parts of it runs, but for those that the profiler dropped."""
    events: list[dict] = []
    for step in range(steps):
        begin = 1000.0 * step
        events.append(span("user_annotation", f"ProfilerStep#{step}", begin, begin + 1000))
        for part in range(kernels):
            start, correlation = begin + part * 1000 / kernels, 1000 * step + part
            events.append(span("cuda_runtime", "cudaLaunchKernel", start, start + 0.1, correlation=correlation))
            if not dropped(step, part):
                end = start + 900 / kernels
                events.append(span("kernel", "nvjet_hsh_gemm", start + 0.1, end, tid=7, correlation=correlation))
    return events


@pytest.mark.parametrize("order", [list, lambda events: events[::-1]], ids=["launch first", "kernel first"])
def test_a_step_of_which_kernels_were_dropped_has_no_parts(
    write_trace: Callable[..., Path], span: Callable[..., dict], order: Callable[[list], list]
) -> None:
    events = order(launched(span, 4, lambda step, part: step == 1 or (step == 2 and part < 5)))
    timeline = read_chrome(write_trace(events), Rules())
    assert [step.number for step in timeline.steps] == [0, 3]
    assert timeline.notes == (
        "left out, as the profiler dropped kernels: step 1 (9 of 9 kernels), step 2 (5 of 9 kernels)",
    )


def test_a_few_dropped_kernels_of_a_step_are_told(write_trace: Callable[..., Path], span: Callable[..., dict]) -> None:
    timeline = read_chrome(write_trace(launched(span, 2, lambda *place: place == (1, 7), 200)), Rules())
    assert ([step.number for step in timeline.steps], timeline.notes) == (
        [0, 1],
        ("the profiler dropped kernels, whose time looks idle: step 1 (1 of 200 kernels)",),
    )


@pytest.mark.parametrize("unmarked", [True, False])
def test_a_trace_without_a_complete_step_is_refused(
    write_trace: Callable[..., Path], span: Callable[..., dict], *, unmarked: bool
) -> None:
    events = launched(span, 8, lambda step, part: part == 0)
    with pytest.raises(UsageError, match=r"no step of this trace is complete; .* step 4 \(1 of 9 kernels\), 3 more"):
        read_trace(write_trace(events), Rules(), unmarked=unmarked)
    if unmarked:
        without = [event for event in events if event["cat"] != "user_annotation"]
        with pytest.raises(UsageError, match=r"step 0 \(8 of 72 kernels\)"):
            read_trace(write_trace(without), Rules(), unmarked=True)


def test_reports_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trace in this folder"):
        find_traces([tmp_path])
    (tmp_path / "nsys_profile").mkdir()
    report = tmp_path / "nsys_profile" / "profile_0.nsys-rep"
    report.write_bytes(b"report")
    with pytest.raises(UsageError, match="must be exported"):
        find_traces([tmp_path])
    with pytest.raises(UsageError, match="must be exported"):
        read_trace(report, Rules())
    with pytest.raises(UsageError, match="no such file"):
        read_trace(tmp_path / "missing.json", Rules())


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in spans for point in range(start, end)}


def is_tidy(spans: list[tuple[int, int]]) -> bool:
    """Sorted, none empty, none touching the next."""
    return all(start < end for start, end in spans) and all(before[1] < after[0] for before, after in pairwise(spans))


@given(SPANS)
def test_a_union_covers_what_any_span_covers(spans: list[tuple[int, int]]) -> None:
    merged = union(spans)
    assert points(merged) == points(spans)
    assert is_tidy(merged)
    assert total(merged) == len(points(spans))


@given(SPANS, SPANS)
def test_intersection_and_difference_are_those_of_sets(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    a, b = union(left), union(right)
    assert points(intersect(a, b)) == points(left) & points(right)
    assert points(subtract(a, b)) == points(left) - points(right)
    assert total(intersect(a, b)) + total(subtract(a, b)) == total(a)
    assert is_tidy(subtract(a, b))


@given(SPANS, st.integers(0, 40), st.integers(0, 40))
def test_clipping_keeps_what_is_inside(spans: list[tuple[int, int]], first: int, width: int) -> None:
    window = (first, first + width)
    assert points(clip(union(spans), window)) == points(spans) & points([window])
