# SPDX-License-Identifier: Apache-2.0
"""A run whose files are damaged or say what nobody expects has a result all the same, and says what is not known."""

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from fake_steps import FIRST_STEP_S, steps_of
from recorded_runs import environment, gpu_record, times_around

from llmb.base.missing import Missing
from llmb.catalogue.resolve import Overrides
from llmb.launch.programs.conclude import finish_run, stored_run
from llmb.launch.programs.port import End
from llmb.readers.samples.node_settings import NodeSettings
from llmb.readers.samples.sample_records import (
    CounterReading,
    GpuSamples,
    HostSample,
    OtherRun,
    Sample,
    SampledGpu,
    SamplerStart,
    to_line,
)
from llmb.reports.run_report import run_table
from llmb.runs.environment import GpuState, RdmaPort
from llmb.runs.folder import RunFolder
from llmb.runs.profiling import Profiling
from llmb.runs.record import RunRecord, read_record
from llmb.runs.result import Result
from llmb.runs.steps import step_to_json

NODES = ("node1", "node2")
STEPS = 20
MEAN_S = 2.0
LASTED_S = 60.0
COUNTERS = {"tcp/node/OutSegs": 1000, "gpu/0/ecc_corrected": 4, "rdma/mlx5_0/packet_seq_err": 40}
AREAS = ("gpu", "rdma", "tcp")


def record() -> RunRecord:
    own = {"save_checkpoint": True, "profiling": Profiling(profile=True, profiler="torch", profile_ranks="0")}
    work = Overrides(gbs=32)  # that 16 GPUs can do in 2 s
    return gpu_record(scale=16, nodes=NODES, steps=STEPS, overrides=work, **own)


def nccl_lines(node: str) -> str:
    texts = (
        "NCCL version 2.28.9+cuda13.0",
        "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>",
        "Using network IB",
        "comm 0x55 rank 0 nranks 16 cudaDev 0",
        "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA",
        "16 coll channels, 16 collnet channels, 16 nvls channels, 32 p2p channels, 2 p2p channels per peer",
    )
    return "".join(f"{node}:41:42 [0] NCCL INFO {text}\n" for text in texts)


def sampled(node: str) -> str:
    """Samples of a node every second, from before the first step to after the last one."""
    gpus = tuple(SampledGpu(index=number, uuid=f"{node}-{number}") for number in range(2))
    lines = [to_line(SamplerStart(node=node, cores=64, interval_s=1.0, gpus=gpus, cpu_limit_cores=8.0))]
    for second in range(int(LASTED_S)):
        host = HostSample(
            cpu_busy_s=second * 2.0,
            cpu_used_s=second * 2.0,
            run_cpu_s=second * 1.0,
            cpu_total_s=second * 64.0,
            load=3.0,
            memory_used_bytes=1 << 34,
            worker_memory_bytes=1 << 30,
        )
        used = GpuSamples(
            power_w=(500.0, 480.0),
            energy_j=(second * 500.0, None),
            sm_clock_mhz=(1980.0, 1755.0),
            temperature_c=(60.0, 61.0),
            memory_used_bytes=(1 << 35, 1 << 35),
            throttle_reasons=((), ("sw_power_cap",)),
            other_pids=((), (4711,)),
        )
        beside = (OtherRun(program="llmb.engine.worker", folder="/r/exp_1/exp", pid=7, since_s=1.0),)
        lines.append(to_line(Sample(time_s=FIRST_STEP_S - 5 + second, host=host, gpus=used, runs=beside)))
    for moment, more in ((0.0, 0), (LASTED_S, 60)):
        risen = {key: value + more for key, value in COUNTERS.items()}
        said = ("NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.",) if more else ()
        lines.append(to_line(CounterReading(read_at_s=moment, counters=risen, read=AREAS, unread={}, kernel=said)))
    return b"".join(lines).decode()


def trace() -> bytes:
    def event(name: str, kind: str, at_us: int, lasted_us: int, **args: object) -> dict[str, object]:
        own = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": 7, "ts": at_us, "dur": lasted_us}
        return own | {"args": args}

    step = event("ProfilerStep#10", "user_annotation", 0, 1000)
    kernels = [event(f"gemm_{at}", "kernel", at, 50, stream=7, device=0) for at in range(0, 900, 100)]
    return json.dumps({"deviceProperties": [{"id": 0}], "traceEvents": [step, *kernels]}).encode()


def written() -> dict[str, bytes]:
    """All files that a conclusion reads, as they are when nothing is wrong."""
    times = times_around(MEAN_S, steps=STEPS)
    gpu = GpuState(node="node1", index=0, uuid="node1-0", throttled_us={"sw_power_cap": 3.0})
    port = RdmaPort(node="node1", device="mlx5_0", port=1, driver="mlx5_core", link_layer="InfiniBand", gbit_s=400)
    seen = environment("NVIDIA H100 80GB HBM3", NODES).model_copy(update={"gpus": (gpu,), "rdma_ports": (port,)})
    save = {"kind": "save", "step": STEPS, "start_s": 1.0, "duration_s": 2.0}
    rank = {"rank": 0, "size_bytes": 1 << 30, "duration_s": 1.5}
    texts = {
        "environment.json": seen.model_dump_json(),
        "vboost.json": '{"level": 1, "nodes_set": 2, "nodes": 2}',
        "checkpoints.jsonl": json.dumps(save | {"ranks": [rank]}) + "\n",
        "nccl_network/rank-0.log": nccl_lines("node1"),
        "nccl_network/rank-8.log": nccl_lines("node2"),
        **{f"resources/{node}.jsonl": sampled(node) for node in NODES},
        **{
            f"resources/{node}.settings.json": NodeSettings(values={"cpu.smt": "on"}, missing={}).model_dump_json()
            for node in NODES
        },
    }
    texts["metrics.jsonl"] = "".join(f"{step_to_json(step)}\n" for step in steps_of(times, record().plan))
    files = {name: text.encode() for name, text in texts.items()}
    return files | {"torch_profile/rank-0.json.gz": gzip.compress(trace())}


def concluded(place: Path, files: Mapping[str, bytes], exit_code: int = 0) -> Result:
    """The result of a run with these files, which the record and what shows it have, too."""
    folder = RunFolder(place / "run_1795298745" / "run")
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.log.touch()
    for name, content in files.items():
        path = folder.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    began = record().model_copy(update={"environment": None, "started_at": "2026-11-20T10:00:00+00:00"})
    result = finish_run(folder, began, End(exit_code))
    kept = read_record(folder)
    assert kept.status == result.status != "running"
    assert stored_run(folder, kept)[0] == kept.result
    run_table(kept.plan, result)
    return result


def reasons(result: Result) -> dict[str, str]:
    return {name: value.reason for name, value in result if isinstance(value, Missing)}


@pytest.mark.parametrize(
    ("name", "content", "missing", "reason"),
    [
        pytest.param(
            "nccl_network/rank-0.log", b"[0] NCCL INFO Using network IB\n", {}, "", id="a line without a writer"
        ),
        pytest.param(
            "resources/node1.jsonl",
            sampled("node1").replace('"memory_used_bytes":17179869184', f'"memory_used_bytes":{"9" * 400}').encode(),
            {"resources"},
            "the samples cannot be read: OverflowError: integer division result too large for a float",
            id="a number too large",
        ),
        pytest.param(
            "resources/node1.jsonl",
            sampled("node1").replace("tcp/node/OutSegs", "gpu/ecc_corrected").encode(),
            set(),
            "",
            id="another counter",
        ),
        pytest.param(
            "checkpoints.jsonl",
            b"\xff\xfe\n{}\n",
            {"checkpoint"},
            "the times of checkpoints cannot be read: ValueError: line 1 is not a complete save or load",
            id="no text",
        ),
        pytest.param("breakdown.json", b"[]", set(), "", id="a breakdown of another form"),
        pytest.param("vboost.json", b"1", set(), "", id="an outcome of another form"),
        pytest.param("torch_profile/rank-0.json.gz", b"\x1f\x8b", set(), "", id="a trace that was cut"),
    ],
)
def test_one_file_costs_only_its_own_figures(
    tmp_path: Path, name: str, content: bytes, missing: set[str], reason: str
) -> None:
    found = concluded(tmp_path, written() | {name: content})
    assert found.status == "success"
    assert found.step_time_s
    assert reasons(found).keys() - {"verdict", "expert_load"} == set(missing)
    assert all(reasons(found)[key] == reason for key in missing)


def test_names_of_files_may_be_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "run_1795298745" / "run"
    for name in ("resources", "nccl_network"):
        (folder / name).mkdir(parents=True)
    odd = bytes(folder / "resources") + b"/n\xffode.settings.json"
    Path(odd.decode(errors="surrogateescape")).write_text('{"values": {"cpu.smt": "off"}, "missing": {}}')
    Path((bytes(folder / "nccl_network") + b"/\xff.log").decode(errors="surrogateescape")).write_text("")
    result = concluded(tmp_path, written())
    assert result.status == "success"
    kept = read_record(RunFolder(folder))
    assert kept.settings
    assert "n\\udcffode" in kept.settings.nodes


def test_steps_that_cannot_be_read_make_a_run_invalid_with_the_reason(tmp_path: Path) -> None:
    files = written()
    lines = files["metrics.jsonl"].splitlines(keepends=True)
    files["metrics.jsonl"] = b"".join((*lines[:5], lines[5][:40], *lines[6:]))
    whole = concluded(tmp_path / "ended", files)
    assert whole.status == "invalid"
    assert whole.reason == "its files cannot be read: the line is damaged or incomplete (metrics.jsonl:6)"
    failed = concluded(tmp_path / "failed", files, exit_code=3)
    assert (failed.status, failed.reason) == ("failed", f"{whole.reason}; exit code 3")


def test_a_file_that_is_something_else_costs_nothing_but_what_it_would_tell(tmp_path: Path) -> None:
    folder = tmp_path / "run_1795298745" / "run"
    folder.mkdir(parents=True)
    for name in ("environment.json", "vboost.json", "checkpoints.jsonl", "breakdown.json", "stall.txt"):
        (folder / name).mkdir()
    for name in ("nccl_network/rank-0.log", "resources/node1.jsonl", "resources/node1.settings.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        os.mkfifo(folder / name)
    files = {"metrics.jsonl": written()["metrics.jsonl"]}
    result = concluded(tmp_path, files)
    assert result.status == "success"
    assert {"resources", "machine", "checkpoint"} <= reasons(result).keys()
    kept = json.loads((folder / "run.json").read_text())
    assert kept["environment_reason"] == "what the workers wrote cannot be read: it is a directory, not a regular file"
