# SPDX-License-Identifier: Apache-2.0
"""What happened on the nodes of runs that ended: from the files to the record, the verdict and the causes."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import gpu_record, times_around, write_run

from llmb.base.missing import Missing
from llmb.jobs.read_run import read_folder, recorded_run
from llmb.jobs.states import read_figures
from llmb.readers.samples.counters import AREAS, WORTH_KEEPING
from llmb.readers.samples.machine import MachineReport, find_events, machine_rules
from llmb.readers.samples.sample_records import CounterReading, SamplerStart, to_line
from llmb.readers.samples.samples import Sampled
from llmb.reports.run_report import machine_table, run_table
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.environment import QUERIES, GpuState, command, of_run, parse_states
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record
from llmb.verdict.explain_run import explain
from llmb.verdict.judge_run import judge_against

NODES = ("node1", "node2")
ALL = ("gpu", *AREAS, "kernel_log")
LASTED_S = 600.0
BEFORE = {"tcp/node/OutSegs": 1000, "rdma/mlx5_0/packet_seq_err": 40}
AFTER = BEFORE | {"tcp/node/OutSegs": 9_000_000}


def reading(time_s: float, counters: Mapping[str, int], *kernel: str, **unread: str) -> CounterReading:
    read = tuple(area for area in ALL if area not in unread)
    return CounterReading(read_at_s=time_s, counters=dict(counters), read=read, unread=unread, kernel=kernel)


def lines(node: str, *readings: CounterReading) -> str:
    start = SamplerStart(node=node, cores=64, interval_s=1.0)
    return b"".join(map(to_line, (start, *readings))).decode()


def ended(
    root: Path, mean_s: float, rises: Mapping[str, int], *kernel: str, exit_code: int = 0, last: bool = True
) -> AnalyzedRun:
    """A run on two nodes, on the second of which this rose and the kernel said that."""
    risen = AFTER | {key: AFTER.get(key, 0) + rise for key, rise in rises.items()}
    readings: dict[str, Sequence[CounterReading]] = {
        "node1": (reading(0.0, BEFORE), reading(LASTED_S, AFTER)),
        "node2": (reading(0.0, BEFORE), *([reading(LASTED_S, risen, *kernel)] * last)),
    }
    files = {f"resources/{node}.jsonl": lines(node, *each) for node, each in readings.items()}
    times = times_around(mean_s)[: 9 if exit_code else None]
    path = write_run(root, gpu_record(scale=16, nodes=NODES), times, exit_code=exit_code, files=files)
    return recorded_run(read_folder(RunFolder(path)))


def machine(run: AnalyzedRun) -> MachineReport:
    assert run.record and run.record.result and run.record.result.machine
    return run.record.result.machine


@pytest.mark.parametrize(
    ("rises", "kernel", "kind", "state"),
    [
        ({"rdma/mlx5_0/packet_seq_err": 5120}, "", "retransmissions", "doubtful"),
        ({"tcp/node/RetransSegs": 90_000}, "", "retransmissions", "doubtful"),
        ({"rdma/mlx5_3/symbol_error": 800}, "", "link_errors", "doubtful"),
        ({"rdma/mlx5_3/port_xmit_discards": 800}, "", "discards", "doubtful"),
        ({"rdma/mlx5_3/np_cnp_sent": 90_000_000}, "", "congestion", "doubtful"),
        ({"rdma/mlx5_3/link_downed": 1}, "", "link_flap", "doubtful"),
        ({"network/eth0/carrier_changes": 2}, "", "link_flap", "doubtful"),
        ({"gpu/3/ecc_uncorrected": 1}, "", "gpu_memory", "faulty"),
        ({"gpu/3/ecc_corrected": 900}, "", "gpu_memory", "doubtful"),
        ({"gpu/3/nvlink_recoveries": 1}, "", "nvlink", "doubtful"),
        ({"gpu/3/slowed_by_heat_ns": 60 * 10**9}, "", "throttling", "doubtful"),
        ({"pci/0000:1b:00.0/aer_nonfatal": 1}, "", "pcie", "faulty"),
        ({"host_memory/mc0/ue_count": 1}, "", "host_memory", "faulty"),
        ({"cpu/package0/throttle_count": 90_000}, "", "cpu_throttling", "doubtful"),
        ({"memory/node/oom_kill": 1}, "", "oom", "doubtful"),
        ({"memory/node/pswpout": 900_000}, "", "paging", "doubtful"),
        ({}, "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.", "gpu_error", "faulty"),
        ({}, "NVRM: Xid (PCI:0000:1b:00): 32, Channel ID 00000008", "gpu_error", "doubtful"),
        ({}, "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 22 LTSSM Fault Up", "nvlink", "faulty"),
        ({}, "pcieport 0000:17:01.0: AER: Corrected error message received from 0000:18:00.0", "pcie", "doubtful"),
        ({}, "mlx5_core 0000:18:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal)", "pcie", "faulty"),
        ({}, "mce: [Hardware Error]: MachineReport check events logged", "machine_check", "doubtful"),
        ({}, "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0", "host_memory", "faulty"),
        ({}, "mlx5_core 0000:18:00.0 ens3np0: Link down", "link_flap", "doubtful"),
        ({}, "bond0: lost carrier", "link_flap", "doubtful"),
        ({}, "Out of memory: Killed process 4711 (python3) total-vm:99kB", "oom", "doubtful"),
        ({}, "INFO: task kworker/3:1:99 blocked for more than 120 seconds.", "hung", "doubtful"),
        ({}, "nvme nvme0: controller is down; will reset: CSTS=0x3", "storage", "doubtful"),
        ({}, "nfs: server 10.0.0.9 not responding, still trying", "storage", "doubtful"),
    ],
)
def test_each_disturbance_is_the_first_cause_with_its_node(
    tmp_path: Path, rises: dict[str, int], kernel: str, kind: str, state: str
) -> None:
    assert not kernel or WORTH_KEEPING.search(kernel), "the sampler keeps it"
    run = ended(tmp_path, 12.0, rises, *filter(None, [kernel]))
    found = machine(run)
    (event,) = found.events
    assert (found.state, event.node, event.kind, event.state) == (state, "node2", kind, state)
    assert found.faulty_nodes == (("node2",) if state == "faulty" else ())
    explained = explain(run)
    assert explained
    assert explained.causes[0].name == "machine_fault"
    assert explained.causes[0].evidence[0].startswith(f"{machine_rules().kinds[kind].title} on node2: ")
    assert "node2" in [row[0] for row in machine_table(found).rows]


def test_a_verdict_says_first_what_happened_and_is_soft(tmp_path: Path) -> None:
    slow = ended(tmp_path, 12.0, {"rdma/mlx5_0/packet_seq_err": 5120})
    good = [ended(tmp_path, mean, {}) for mean in (10.0, 10.01, 9.99)]
    (judged,) = judge_against([slow], good, "before")
    assert judged.verdict.soft
    said = "retransmissions on node2: packet_seq_err of mlx5_0 rose by 5,120"
    more = f"(see 'llmb judge {slow.id} --explain')"
    assert judged.verdict.sentence.startswith(f"{said} {more}; 20.0 % slower than the baseline")
    result = slow.record and slow.record.result
    assert slow.record and result and result.verdict and result.verdict.sentence.startswith("retransmissions on node2")
    shown = "\n".join(" ".join(map(str, row)) for row in run_table(slow.record.plan, result).rows)
    assert "DOUBTFUL NODE   retransmissions on node2: packet_seq_err of mlx5_0 rose by 5,120" in shown
    assert machine_table(machine(slow)).rows[0][:3] == ("node2", "retransmissions", "doubtful")
    stored = json.loads((slow.path / "run.json").read_text())["result"]["machine"]
    assert (stored["state"], stored["events"][0]["before"], stored["events"][0]["after"]) == ("doubtful", 40, 5160)
    assert read_record(RunFolder(slow.path)).result == result


def test_a_faulty_node_of_a_run_that_failed_is_at_fault(tmp_path: Path) -> None:
    run = ended(tmp_path, 10.0, {}, "NVRM: Xid (PCI:0000:1b:00): 94, pid=7, Contained ECC error", exit_code=1)
    assert run.status == "failed"
    assert machine(run).state == "faulty"
    assert read_figures(str(run.path))["bad_nodes"] == "node2"


def test_a_node_whose_end_was_not_read_is_unknown(tmp_path: Path) -> None:
    found = machine(ended(tmp_path, 10.0, {}, last=False))
    assert (found.state, found.events) == ("unknown", ())
    assert [(one.what, one.nodes) for one in found.unread] == [("all counters", ("node2",))]
    record = gpu_record(scale=16, nodes=NODES)
    files = {
        "resources/node1.jsonl": lines(
            "node1", reading(0.0, {}), reading(9.0, {}, kernel_log="/dev/kmsg: Permission denied")
        )
    }
    run = recorded_run(read_folder(RunFolder(write_run(tmp_path, record, times_around(10.0), files=files))))
    assert machine(run).state == "unknown", "a node was not sampled"
    assert [(one.what, one.nodes) for one in machine(run).unread] == [
        ("all counters", ("node2",)),
        ("the kernel's log", ("node1",)),
    ]


def test_a_run_without_samples_has_a_reason(tmp_path: Path) -> None:
    record = gpu_record()
    run = recorded_run(read_folder(RunFolder(write_run(tmp_path, record, times_around(10.0)))))
    assert run.record and run.record.result
    assert run.record.result.machine == Missing("the run folder has no samples")


HARMLESS = {
    "rdma/mlx5_0/symbol_error": 9,
    "rdma/mlx5_0/packet_seq_err": 9,
    "rdma/mlx5_1/out_of_sequence": 20_000,
    "rdma/rdmap160s27/retrans_pkts": 20_000,
    "rdma/mlx5_1/np_cnp_sent": 2_000_000,
    "rdma/mlx5_1/port_xmit_wait": 9_000_000,
    "rdma/mlx5_1/port_rcv_data": 10**15,
    "network/eth0/rx_packets": 10**8,
    "network/eth0/rx_dropped": 900,
    "network/eth0/rx_missed_errors": 90,
    "tcp/node/RetransSegs": 5_000,
    "pci/0000:1b:00.0/aer_correctable": 9,
    "host_memory/mc0/ce_count": 9,
    "cpu/package0/throttle_count": 300,
    "memory/node/pgmajfault": 150_000,
    "memory/node/pswpin": 20_000,
    "gpu/0/nvlink_replays": 2_000,
    "gpu/0/pcie_replays": 200,
    "gpu/0/slowed_by_heat_ns": 10**9,
}
"""The most that nodes without a fault show in ten minutes."""
TALK = (
    "NVRM: Xid (PCI:0000:1b:00): 45, pid=4711, name=python3, Ch 00000008",
    "nvidia-nvlink: Nvlink Core is being initialized",
    "mlx5_core 0000:18:00.0 ens3np0: Link up",
    "pcieport 0000:17:01.0: AER: enabled with IRQ 34",
    "rcu: Hierarchical SRCU implementation.",
    "EDAC MC0: Giving out device to module i10nm_edac",
)


def test_fifty_clean_runs_have_no_false_word(tmp_path: Path) -> None:
    for seed in range(50):
        draw = random.Random(seed)
        rises = {key: draw.randint(0, most) for key, most in HARMLESS.items() if draw.random() < 0.7}
        said = draw.sample(TALK, draw.randint(0, len(TALK)))
        readings = reading(0.0, {}), reading(LASTED_S, rises | {"tcp/node/OutSegs": 9_000_000}, *said)
        start = SamplerStart(node="node1", cores=64, interval_s=1.0)
        found = find_events([Sampled(start, (), readings)] * 2, NODES[:1])
        assert (found.state, found.events, found.unread) == ("clean", (), ()), (seed, rises, said)
    run = ended(tmp_path, 12.0, HARMLESS, *TALK)
    assert machine(run).events == ()
    explained = explain(run)
    assert explained and "machine_fault" not in [cause.name for cause in explained.causes]


NEWEST, EVENTS, OLDEST = QUERIES
UUIDS = ("GPU-6f4e1c1e-5d6b-9a3b-1f0a-000000000001", "GPU-6f4e1c1e-5d6b-9a3b-1f0a-000000000002")
H100 = (
    "{index}, 580.65.06, {uuid}, NVIDIA H100 80GB HBM3, Enabled, Disabled, Enabled, 700.00, 700.00, 412.53, 61, 1755, "
    "2619, 1980, 2619, 1980, 2619, 0x0000000000000024, 91403239, 0, 1200, 0, 0"
)


def test_a_node_of_two_gpus() -> None:
    text = "".join(H100.format(index=index, uuid=uuid) + "\n" for index, uuid in enumerate(UUIDS))
    driver, gpus = parse_states(text, NEWEST, "node1")
    assert driver == "580.65.06"
    assert [gpu.uuid for gpu in gpus] == list(UUIDS)
    assert gpus[0] == GpuState(
        node="node1",
        index=0,
        uuid=UUIDS[0],
        name="NVIDIA H100 80GB HBM3",
        persistence_mode="Enabled",
        mig_mode="Disabled",
        ecc_mode="Enabled",
        power_limit_w=700,
        default_power_limit_w=700,
        power_w=412.53,
        temperature_c=61,
        sm_clock_mhz=1755,
        memory_clock_mhz=2619,
        max_sm_clock_mhz=1980,
        max_memory_clock_mhz=2619,
        application_sm_clock_mhz=1980,
        application_memory_clock_mhz=2619,
        throttle_reasons=("sw_power_cap", "sw_thermal_slowdown"),
        throttled_us={
            "sw_power_cap": 91403239,
            "sync_boost": 0,
            "sw_thermal_slowdown": 1200,
            "hw_thermal_slowdown": 0,
            "hw_power_brake_slowdown": 0,
        },
    )


@pytest.mark.parametrize("word", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]", ""])
def test_what_is_not_supported_is_none(word: str) -> None:
    """As on a consumer's GPU, or on one in MIG mode."""
    text = f"0, 535.183.01, GPU-x, NVIDIA A30, {', '.join([word] * (len(NEWEST) - 4))}\n"
    (gpu,) = parse_states(text, NEWEST, "n").gpus
    assert gpu == GpuState(node="n", index=0, uuid="GPU-x", name="NVIDIA A30")


def test_an_older_driver_has_no_counters_and_says_throttled() -> None:
    text = "0, 525.60.13, GPU-x, Tesla V100, Disabled, [N/A], Enabled, 300.00, 300.00, 25 W, 31, 135, 877, 1530, 877, "
    (gpu,) = parse_states(f"{text}1290, 877, 0x0000000000000001\n", OLDEST, "n").gpus
    assert gpu.throttle_reasons == ("gpu_idle",)
    assert gpu.throttled_us is None
    assert gpu.power_w == 25  # with its unit, although none was asked for
    assert gpu.application_sm_clock_mhz == 1290
    assert parse_states(f"{text}1290, 877, 0x0\n", EVENTS, "n").gpus[0].throttle_reasons == ()


@pytest.mark.parametrize("text", ["", "No devices were found\n", "Unable to determine the device handle\n", "0, 1\n"])
def test_other_output_describes_no_gpu(text: str) -> None:
    assert parse_states(text, NEWEST, "n") == (None, ())


VALUES = st.sampled_from(["", "[N/A]", "nan", "1e999", "0x", "²", "-1", "0x4", " 7 W"]) | st.text("x%\0é", max_size=3)


@given(st.lists(VALUES, min_size=23, max_size=23))
def test_any_output_describes_one_gpu_or_none(values: list[str]) -> None:
    assert len(parse_states(",".join(values), NEWEST, "n").gpus) <= 1


def test_only_the_gpus_of_the_run_are_kept() -> None:
    gpus = [GpuState(node="n", index=index, uuid=uuid) for index, uuid in enumerate(UUIDS)]
    assert of_run(gpus, [UUIDS[1].removeprefix("GPU-")]) == (gpus[1],)  # torch leaves out the prefix
    assert of_run(gpus, UUIDS) == tuple(gpus)
    assert of_run(gpus, ["MIG-1"]) == tuple(gpus)
    assert of_run(gpus, [None]) == tuple(gpus)
    assert of_run([], [None]) == ()


def test_the_query_prints_values_alone() -> None:
    assert command(("index", "uuid")) == ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader,nounits"]
    assert all(len(set(fields)) == len(fields) for fields in QUERIES)
