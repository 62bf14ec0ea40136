# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (lines as other programs write them)
"""Whatever a file holds, its reader reports it or ends in an error that names the file: never in a traceback."""

import gzip
import json
import os
import re
import resource
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from campaign_files import CampaignFiles
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmb.base.errors import LlmbError
from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.campaigns.campaign_files import read_campaign_file
from llmb.jobs.campaigns.expansion import expand
from llmb.jobs.read_run import run_of_log
from llmb.launch.jobspec.spec import JobSpec
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.site.cluster_config import read_cluster_file
from llmb.readers.logs.log_files import find_all_logs, find_logs, parse_file
from llmb.readers.nccl.nccl_log import find_nccl_files, read_nccl_logs
from llmb.readers.nccl.nccl_summary import Codes, summarize_nccl
from llmb.readers.nccl.nccl_tests import read_test_tables
from llmb.readers.profiles.breakdown import StepBreakdown, summarize
from llmb.readers.profiles.trace_files import find_traces, read_traces
from llmb.reports.output import json_text
from llmb.reports.parse_report import parse_document, parse_report
from llmb.reports.table import Table, plain_lines, terminal_lines
from llmb.reports.trace_report import nccl_document, nccl_tables, trace_document, trace_picture, trace_tables
from llmb.runs.folder import read_stored
from llmb.runs.record import JobEnd, RunRecord, SubmittedJob
from llmb.runs.steps import read_steps

EXAMPLES = int(os.environ.get("LLMB_MUTATIONS", "20"))
RUNS = Path(__file__).parents[1] / "data" / "root" / "workloads"
SAMPLES = sorted((Path(__file__).parents[1] / "readers" / "logs" / "samples").iterdir())
CODES, CATALOGUE = Codes(), Catalogue()
TOKENS = (
    b"", b"null", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"9" * 400, b"1e18", b"9223372036854775808", b'"x"', b"[]", b"{}",
    b"true", b"[" * 300, b"{", b"}", b"]", b'"', b",", b":", b"\n", b"\r", b"\t", b" " * 300, b"\x00", b"\xff", b"\xef\xbb\xbf",
    b"\\ud800", b"\xed\xa0\x80", b"\xc2\xb2", b"inf", b"nan", b"N/A", b"0x", b"- Init COMPLETE", b"comm", b"&a ", b"*a", b"!!int ", b"<<: ", b"|", b"#",
)  # fmt: skip


def mutated(text: bytes, edits: Iterable[tuple[float, float, bytes, int]]) -> bytes:
    """Each edit replaces a span by a token, repeats it, or ends the text."""
    for begin, length, token, how in edits:
        at = int(begin * len(text))
        end = min(len(text), at + int(length * 40))
        middle = (token, text[at:end] * 3, token + text[at:end], text[end : end + 20] + text[at:end])[how % 4]
        text = text[:at] + middle + (b"" if how == 7 else text[end:])
    return text


EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.sampled_from(TOKENS) | st.binary(max_size=4), st.integers(0, 7)),
    min_size=1,
    max_size=4,
)


def show(document: object, tables: Iterable[Table] = ()) -> None:
    """As the commands print it."""
    json_text(document).encode()
    for table in tables:
        "\n".join([*plain_lines(table), *terminal_lines(table, 80)]).encode()


def traces(path: Path) -> None:
    summary = summarize(read_traces(find_traces([path]), unmarked=True))
    show(trace_document(summary), trace_tables(summary))
    trace_picture(summary).encode()


def nccl(path: Path) -> None:
    files = find_nccl_files([path])
    tests = [table for file in files for table in read_test_tables(file)]
    log = read_nccl_logs(files)
    summary = summarize_nccl(log, CODES) if log.calls else None
    show(nccl_document(summary, tests), nccl_tables(summary, tests))


def logs(path: Path) -> None:
    parsed = [run_of_log(parse_file(log, "last")) for log in find_logs(path).logs]
    show(parse_document(parse_report([path], "last", parsed, full_names=False)))


def reference_config(name: str) -> bytes:
    return (Path(__file__).parents[1] / "data" / "reference_configs" / f"{name}.yaml").read_bytes()


def cluster_config(path: Path) -> None:
    read_cluster_file(path, cluster_schema())


def campaign(path: Path) -> None:
    files = CampaignFiles(CATALOGUE, path.parent)
    expand(CATALOGUE, read_campaign_file(path, files.keys, files.split).entries, "h100")


def record(shape: type[Any]) -> Callable[[Path], object]:
    return lambda path: str(read_stored(path, shape))


def trace_text() -> bytes:
    common = {"ph": "X", "pid": 0, "tid": 7}
    events = [
        {**common, "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 100},
        {**common, "cat": "kernel", "name": "a_gemm", "ts": 0, "dur": 60, "args": {"stream": 7}},
        {**common, "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ts": 40.5, "dur": 50, "args": {"Collective name": "allreduce", "Process Group Name": "0"}},
        {**common, "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 95, "dur": 1},
        {**common, "cat": "gpu_user_annotation", "name": "ProfilerStep#3", "ts": 1, "dur": 104},
    ]  # fmt: skip
    return json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 3}, "traceEvents": events}).encode()


def cpu_trace_text() -> bytes:
    text = trace_text().replace(b'"kernel"', b'"cpu_op"').replace(b"a_gemm", b"aten::mm")
    return text.replace(b"gpu_memcpy", b"cpu_op")


def sqlite_export(path: Path) -> bytes:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            """PRAGMA page_size = 512;
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, demangledName INT, globalPid INT, correlationId INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT, globalPid INT, correlationId INT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, text TEXT, globalTid INT);
            INSERT INTO StringIds VALUES (1, 'a_gemm'), (2, 'ncclDevKernel_AllReduce_Sum_f32_RING_LL');
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 20, 1, 16777216, 1), (15, 30, 2, 16777216, 2);
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, 16777217, 1), (3, 4, 16777217, 2);
            INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (30, 40, 16777216, 3);
            INSERT INTO NVTX_EVENTS VALUES (0, 100, 'step 1', 16777217);"""
        )
    return path.read_bytes()


NCCL = b"".join(
    b"node7:%d:9 [%d] NCCL INFO ncclCommSplit comm 0x5%d rank %d nranks 2 cudaDev %d nvmlDev %d busId 1b000 %s - Init START\n"
    b"node7:%d:9 [%d] NCCL INFO AllReduce: opCount 1f sendbuff 0x7f recvbuff 0x7f count 1048576 datatype 7 op 0 root 0 comm 0x5%d [nranks=2] stream 0x56\n"
    b"Training epoch 0, iteration 0/4 | train_step_timing in s: 2.6 | consumed_samples: 8\n"
    % (rank, rank, kind, rank, rank, rank, more, rank, rank, kind)
    for kind, more in enumerate(
        (b"commId 0x77", b"parent 0x50 splitCount 1 color 3 key 0", b"parent 0x50 color 3 key 0")
    )
    for rank in (0, 1)
)
NCCL_TESTS = b"""0: # Collective test starting: all_reduce_perf
0: #  Rank  0 Group  0 Pid 866559 on      node7 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
0: #                                                              out-of-place                       in-place
0: #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
0:         1024           256     float     sum      -1    18.46    0.06    0.08      0    18.56    0.06    0.09    N/A
0:      1048576        262144     float     sum      -1    30.00   34.95   61.17      0    30.00   34.95   61.17      3  2026-05-13 18:01:41
0: # Avg bus bandwidth    : 62.7
"""
CONFIG = b"""cluster_name: c
gpu_type: h100
environment: {NCCL_DEBUG: INFO, LEVEL: 1}
slurm: {account: a, partition: batch}
workloads:
  pretrain_llama3.1: {environment: {A: "b"}}
"""
CAMPAIGN = b"""defaults: {repeats: 2, env: {NCCL_DEBUG: INFO}}
sweep: {tp: [1, 2]}
pretrain_llama3.1_8b:
  dtypes: [fp8, bf16]
  scales: 8
  tasks:
    - {repeats: 1, overrides: {params: {mbs: 1}}}
"""
LINES = b"""pretrain_llama3.1 8b bf16 8 tp=2 repeats=2
pretrain_llama3.1_8b:
('fp8', [8, 16], 1, True)
"""


def of_a_run(name: str) -> bytes:
    return sorted(RUNS.rglob(name))[0].read_bytes()


READERS: dict[str, tuple[str, Callable[[Path], bytes], Callable[[Path], object]]] = {
    "PyTorch's trace": ("trace.json", lambda _: trace_text(), traces),
    "PyTorch's trace of a CPU": ("trace.json", lambda _: cpu_trace_text(), traces),
    "compressed trace": ("trace.json.gz", lambda _: gzip.compress(trace_text()), traces),
    "export of Nsight Systems": ("profile_0.sqlite", lambda path: sqlite_export(path.with_suffix(".seed")), traces),
    "NCCL log": ("rank-0.log", lambda _: NCCL, nccl),
    "nccl-tests": ("tests.txt", lambda _: NCCL_TESTS, nccl),
    **{path.stem: ("log.out", lambda _, path=path: path.read_bytes(), logs) for path in SAMPLES},
    "cluster configuration": ("cluster_config.yaml", lambda _: CONFIG, cluster_config),
    "reference configuration": ("cluster_config.yaml", lambda _: reference_config("flat"), cluster_config),
    "reference configuration 2": ("cluster_config.yaml", lambda _: reference_config("version2"), cluster_config),
    "campaign in YAML": ("jobs.yaml", lambda _: CAMPAIGN, campaign),
    "campaign in text": ("jobs.txt", lambda _: LINES, campaign),
    "record of a run": ("run.json", lambda _: of_a_run("run.json"), record(RunRecord)),
    "record of a job": ("job.json", lambda _: of_a_run("job.json"), record(SubmittedJob)),
    "end of a job": ("job_end.json", lambda _: of_a_run("job_end.json"), record(JobEnd)),
    "steps of a run": ("metrics.jsonl", lambda _: of_a_run("metrics.jsonl"), lambda path: str(read_steps(path))),
    "breakdown of a step": ("breakdown.json", lambda _: b'{"step": 1}', record(StepBreakdown)),
    "specification of a job": ("job_spec.json", lambda _: b'{"name": "a"}', record(JobSpec)),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_no_content_ends_in_a_traceback(tmp_path: Path, reader: str) -> None:
    name, seed_of, read = READERS[reader]
    path = tmp_path / name
    seed = seed_of(path)

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(EDITS)
    def attempt(edits: list[tuple[float, float, bytes, int]]) -> None:
        path.write_bytes(mutated(seed, edits))
        try:
            read(path)
        except LlmbError as error:
            assert name in str(error), error

    path.write_bytes(seed)
    if reader not in ("breakdown of a step", "specification of a job"):
        read(path)
    attempt()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, reader: str, kind: str) -> None:
    name, _, read = READERS[reader]
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((LlmbError, OSError)):
        read(path)


LONG_LINE = 10_000_000
LONGEST_S, MOST_BYTES = 60, 1 << 30


@pytest.mark.measured
@pytest.mark.parametrize("reader", [name for name, (_, _, read) in READERS.items() if read in (traces, nccl, logs)])
def test_long_lines_take_no_quadratic_time_and_little_memory(tmp_path: Path, reader: str) -> None:
    name, seed_of, read = READERS[reader]
    path = tmp_path / name
    seed = seed_of(path)
    for long in (b"x" * LONG_LINE, seed.replace(b"\n", b" ") * (LONG_LINE // len(seed)), b"9" * LONG_LINE):
        for text in (long, seed + long, seed + long + b"\n" + seed):
            path.write_bytes(text)
            began_s = time.process_time()
            with suppress(LlmbError):
                read(path)
            assert time.process_time() - began_s < LONGEST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MOST_BYTES


NUMBER = re.compile(rb"(?<![\w.])\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def test_a_damaged_log_takes_no_other_down(tmp_path: Path) -> None:
    """There is one result for each file, and the undamaged log has its figures."""
    for sample in SAMPLES:
        for number in (b"0", b"-1", b"nan", b"inf", b"1e308", b"1" + b"0" * 400, b"1,5", b""):
            text = NUMBER.sub(lambda _, new=number: new, sample.read_bytes())
            (tmp_path / f"{sample.stem}-{number[:4].hex()}.out").write_bytes(text)
    shutil.copy(SAMPLES[0].with_name("megatron_lm.log"), tmp_path / "good.out")
    found = find_all_logs([tmp_path])
    runs = [run_of_log(parse_file(path, "reference")) for path in found.logs]
    document = parse_document(parse_report([tmp_path], "reference", runs, full_names=False))
    json_text(document)
    results = {result["filename"]: result for result in document["results"]}
    assert len(results) == len(list(tmp_path.iterdir()))
    assert results["good"]["step_time_s"]["mean"] == pytest.approx(2.395)
