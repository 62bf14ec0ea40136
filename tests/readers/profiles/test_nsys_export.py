# SPDX-License-Identifier: Apache-2.0
"""SQLite exports of Nsight Systems, made with the tables and columns that its schema documents."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from llmb.base.errors import UsageError
from llmb.readers.profiles.breakdown import break_down
from llmb.readers.profiles.classify import Rules
from llmb.readers.profiles.nsys_export import read_nsys
from llmb.readers.profiles.trace_files import read_trace

TABLES = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
  text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER);
"""
PUSH_POP = 59
GEMM, SHORT, REDUCE, STEP = 1, 2, 3, 4


def pid_of(process: int) -> int:
    return process << 24


def export(path: Path, *processes: int) -> Path:
    """Two steps a process: in the first, launched from 0 to 20, the GPU works till 100."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(TABLES)
        names = [(GEMM, "void gemm<bf16>(float)"), (SHORT, "Kernel2"), (STEP, "step 8")]
        names.append((REDUCE, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)"))
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
        for process in processes:
            pid, thread = pid_of(process), pid_of(process) + 5
            kernels = [(5, 60, 11, GEMM), (50, 100, 12, REDUCE), (110, 150, 13, GEMM)]
            launches = [(1, 11), (15, 12), (101, 13)]
            connection.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, ?, ?)",
                [(start, end, correlation, pid, name, SHORT) for start, end, correlation, name in kernels],
            )
            connection.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0, 0)",
                [(start, start + 1, thread, correlation) for start, correlation in launches],
            )
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (150, 155, 0, 7, 14, ?, 64, 1)", (pid,))
            connection.execute(
                "INSERT INTO NVTX_EVENTS VALUES (0, 20, ?, NULL, 'step 7', ?, NULL, 0)", (PUSH_POP, thread)
            )
            connection.execute(
                "INSERT INTO NVTX_EVENTS VALUES (100, 160, ?, NULL, NULL, ?, ?, 0)", (PUSH_POP, thread, STEP)
            )
            connection.execute("INSERT INTO NVTX_EVENTS VALUES (2, NULL, 34, NULL, 'step 99', ?, NULL, 0)", (thread,))
    return path


def test_kernels_count_for_the_step_that_launched_them(tmp_path: Path) -> None:
    (timeline,) = read_trace(export(tmp_path / "profile_6.sqlite", 4242), Rules())
    first, second = break_down(timeline)
    assert (timeline.rank, timeline.device) == (6, "gpu")
    assert (first.step, second.step) == (7, 8)
    nanoseconds = [
        round(1e9 * value)
        for value in (
            first.duration_s,
            first.matrix_product_s,
            first.communication_exposed_s,
            first.communication_hidden_s,
            first.idle_s,
        )
    ]
    assert nanoseconds == [100, 55, 40, 10, 5]
    assert [round(1e9 * value) for value in (second.duration_s, second.matrix_product_s, second.memory_copy_s)] == [
        60,
        40,
        5,
    ]
    (collective,) = first.collectives
    assert (collective.kind, collective.group, collective.calls) == ("reduce_scatter", None, 1)


def test_a_step_of_which_kernels_were_dropped_has_no_parts(tmp_path: Path) -> None:
    """Copies and graphs are no kernels, and each process has correlations of its own."""
    path = export(tmp_path / "profile_6.sqlite", 4242, 4243)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO StringIds VALUES (10, 'cudaLaunchKernel_v7000'), (11, 'cudaMemcpyAsync_v3020')")
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET nameId = 10")
        pid = pid_of(4242)
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (102, 103, 0, ?, 99, 11, 0)", (pid,))
        connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE globalPid = ? AND correlationId = 12", (pid,))
    dropped, whole = read_nsys(path, Rules())
    assert ([step.number for step in dropped.steps], [step.number for step in whole.steps]) == ([8], [7, 8])
    assert dropped.notes == ("left out, as the profiler dropped kernels: step 7 (1 of 2 kernels)",)
    assert whole.notes == ()


def test_the_gpu_of_an_export_is_named(tmp_path: Path) -> None:
    path = export(tmp_path / "profile_3.sqlite", 100)
    assert [each.gpu_name for each in read_trace(path, Rules())] == [None]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT)")
        connection.executemany("INSERT INTO TARGET_INFO_GPU VALUES (0, ?, ?)", [(1, "other"), (0, "NVIDIA H200")])
    assert [each.gpu_name for each in read_trace(path, Rules())] == ["NVIDIA H200"]


def test_processes_of_one_report_are_told_apart(tmp_path: Path) -> None:
    timelines = read_nsys(export(tmp_path / "node.sqlite", 4242, 4243), Rules())
    assert [timeline.source for timeline in timelines] == ["node.sqlite process 4242", "node.sqlite process 4243"]
    assert [timeline.rank for timeline in timelines] == [None, None]
    assert [sum(item.calls for item in timeline.names) for timeline in timelines] == [4, 4]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 1 WHERE start = 50", "one process has kernels on several"),
        ("UPDATE NVTX_EVENTS SET text = 'step 8' WHERE start = 0", "step 8 is marked several times"),
    ],
)
def test_several_gpus_or_steps_are_not_counted_as_one(tmp_path: Path, change: str, problem: str) -> None:
    path = export(tmp_path / "profile.sqlite", 1)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(change)
    with pytest.raises(UsageError, match=problem):
        read_nsys(path, Rules())


def test_older_exports_have_fewer_columns(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            """CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, shortName INT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, text TEXT, globalTid INT);
            INSERT INTO StringIds VALUES (1, 'a_gemm');
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 30, 1);
            INSERT INTO NVTX_EVENTS VALUES (0, 40, 'step 1', 5);"""
        )
    (step,) = break_down(read_nsys(path, Rules())[0])
    assert (round(1e9 * step.duration_s), round(1e9 * step.matrix_product_s)) == (40, 20)


def test_a_cuda_graph_is_not_idle_time(tmp_path: Path) -> None:
    """By default a graph is one activity: the kernels in it are not in the export."""
    path = export(tmp_path / "profile_0.sqlite", 4242)
    pid, thread = pid_of(4242), pid_of(4242) + 5
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            f"""CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER,
              graphId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER);
            INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (155, 955, 0, 3, 1, 7, 21, {pid});
            INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (0, 0, 0, 3, 1, 7, 22, {pid});
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (102, 103, 0, {thread}, 21, 0, 0);"""
        )
    (timeline,) = read_trace(path, Rules())
    _, second = break_down(timeline)
    nanoseconds = [round(1e9 * value) for value in (second.duration_s, second.cuda_graph_s, second.idle_s)]
    assert nanoseconds == [855, 800, 10]
    graphs, untimed = timeline.notes
    assert "1 CUDA graph recorded as a whole" in graphs
    assert "--cuda-graph-trace=node" in graphs
    assert untimed == "left out: 1 event without a valid time"


def test_an_export_of_graphs_alone_is_read(tmp_path: Path) -> None:
    path = tmp_path / "graphs.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            """CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT, graphId INT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, text TEXT, globalTid INT);
            INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (10, 90, 1);
            INSERT INTO NVTX_EVENTS VALUES (0, 100, 'step 1', 5);"""
        )
    (step,) = break_down(read_nsys(path, Rules())[0])
    assert (round(1e9 * step.cuda_graph_s), round(1e9 * step.idle_s)) == (80, 20)


def test_rows_of_other_types_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "odd.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            """CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, shortName, globalPid, correlationId);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId);
            CREATE TABLE NVTX_EVENTS (start, end, text, globalTid);
            INSERT INTO StringIds VALUES (1, 'a_gemm'), (2, x'ff00'), (3, CAST(x'ff41' AS TEXT));
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 20, 1, 16777216, 1), (20, 30, 2, 16777216, 2),
              (30, 40, 3, 16777216, 3), (40, 50, 99, 16777216, 4), ('x', 60, 1, 16777216, 5),
              (60, NULL, 1, 16777216, 6), (70, 65, 1, 16777216, 7), (70, 80, 1, 'p', 8), (1.5, 80, 1, 16777216, 9);
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ('x', 1, 16777217, 1), (5, 1, 'y', 2), (5, 6, 16777217, 3);
            INSERT INTO NVTX_EVENTS VALUES (0, 100, 'step 1', 16777217), ('a', 'b', 'step 2', 16777217),
              (0, 1, x'00', NULL);"""
        )
    (timeline,) = read_trace(path, Rules())
    assert timeline.notes == ("left out: 5 events without a valid time",)
    (step,) = break_down(timeline)
    nanoseconds = [round(1e9 * value) for value in (step.matrix_product_s, step.unclassified_s)]
    assert nanoseconds == [20, 30]  # a kernel without a name, or without a process, is no idle time


def test_an_export_without_kernels_says_what_to_trace(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    with pytest.raises(UsageError, match="has no GPU kernels") as raised:
        read_trace(path, Rules())
    assert "nsys export --type sqlite" in str(raised.value)


def test_an_export_without_ranges_is_one_step(tmp_path: Path) -> None:
    path = export(tmp_path / "profile_0.sqlite", 4242)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM NVTX_EVENTS")
    with pytest.raises(UsageError, match="no training steps"):
        read_trace(path, Rules())
    (timeline,) = read_trace(path, Rules(), unmarked=True)
    (step,) = break_down(timeline)
    assert (round(1e9 * step.duration_s), round(1e9 * step.idle_s)) == (150, 10)
    assert timeline.notes == ("no step is marked: the whole trace, 0.00015 ms, is shown as step 0",)
