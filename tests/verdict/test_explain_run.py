# SPDX-License-Identifier: Apache-2.0
"""Why runs that ended are slow, from the files of their folders."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fake_steps import FIRST_STEP_S
from recorded_runs import SXM, environment, gpu_record, times_around, write_run
from shown_tables import shown_lines
from typer.testing import CliRunner

from llmb.catalogue.records import Window
from llmb.catalogue.resolve import Overrides
from llmb.cli.judge import app
from llmb.jobs.read_run import read_folder, recorded_run
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.readers.profiles.breakdown import StepBreakdown
from llmb.readers.samples.node_settings import NodeSettings, together
from llmb.readers.samples.sample_records import GpuSamples, HostSample, Sample, SampledGpu, SamplerStart, to_line
from llmb.reports.table import Table, plain_lines
from llmb.reports.verdict_report import explanation_tables
from llmb.runs.analyzed_run import AnalyzedRun, RunSet
from llmb.runs.environment import GpuState
from llmb.runs.folder import RunFolder
from llmb.runs.rank_times import RankTime, RankTimesFile
from llmb.runs.record import RunRecord, read_record
from llmb.runs.result import Reference, Verdict
from llmb.runs.steps import read_steps, step_to_json
from llmb.verdict.compare_runs import compare_runs
from llmb.verdict.explain_run import Explanation, explain, explain_judged
from llmb.verdict.judge_run import judge_against
from llmb.verdict.judgement import without_reference

QUIET = {"data_wait_s": 0.0, "pause_s": 0.0, "host_ahead_s": 5.0, "layer_s_median": 0.01, "outside_layers_s": 0.0}
MEAN_S = 13.15
UNJUDGED = without_reference("not comparable", "nothing to compare with")


def run(root: Path, record: RunRecord | None = None, mean_s: float = MEAN_S, **values: Any) -> AnalyzedRun:
    """A run whose steps have the figures of ``values``."""
    folder = RunFolder(write_run(root, record or gpu_record(), times_around(mean_s)))
    steps = [replace(step, **{**QUIET, **values}) for step in read_steps(folder.steps)]
    folder.steps.write_text("".join(f"{step_to_json(step)}\n" for step in steps))
    return recorded_run(read_folder(folder))


def shares(explanation: Explanation | None) -> dict[str, float | None]:
    assert explanation
    return {cause.name: cause.share_s for cause in explanation.causes}


def lines(explanation: Explanation) -> list[str]:
    return [line for table in explanation_tables(explanation) for line in plain_lines(table)]


def test_the_slow_rank_is_named_with_the_node_that_it_is_on(tmp_path: Path) -> None:
    record = gpu_record(scale=16, nodes=("node1", "node2"))
    slow = run(tmp_path, record)
    file = RankTimesFile(RunFolder(slow.path).rank_times, steps=50, ranks=16)
    for step in range(50):
        file.add(step, [RankTime(0.0, 0.0, 0.02 if rank == 11 else 0.01, 0.0) for rank in range(16)])
    file.close()
    found = explain(slow)
    assert found
    layout = record.plan.recipe.layout
    assert shares(found)["slow_rank"] == pytest.approx(0.01 * layout.layers / layout.pp * layout.ga)
    assert "2 ranks compute its layers together: any of them may be the slow one" in found.causes[0].evidence
    assert found.causes[0].evidence[0].startswith("rank 11 on node2 is the slowest in 10 of 10 steps")


def test_what_the_window_of_the_figure_costs(tmp_path: Path) -> None:
    """The reference is of the last step, the run's window is another one."""
    slow = run(tmp_path)
    steps = read_steps(RunFolder(slow.path).steps)
    last = Window(rule="last", first=49, last=49)
    verdict = Verdict(
        verdict="inconclusive",
        soft=True,
        delta_pct=7.0,
        ci95_pct=None,
        tolerance_pct=5.3,
        tolerance_source="it",
        reference=Reference(kind="published", step_time_s=12.0, window=last, source="a document"),
        conditions=(),
        sentence="",
    )
    RunFolder(slow.path).steps.write_text(
        "".join(f"{step_to_json(replace(step, step_time_s=12.3) if step.step == 49 else step)}\n" for step in steps)
    )
    found = explain(slow, verdict=verdict)
    assert found
    assert shares(found) == {"window": pytest.approx(MEAN_S - 12.3)}
    assert (found.reference, found.gap_s) == ("a document", pytest.approx(MEAN_S - 12))
    assert found.unexplained_s == pytest.approx(0.3)


def test_the_program_of_the_published_figure_takes_what_was_not_measured(tmp_path: Path) -> None:
    found = explain(run(tmp_path))
    assert found
    assert found.gap_s == pytest.approx(MEAN_S - 12.27, abs=0.02)
    assert [cause.name for cause in found.causes] == ["implementation", "machine", "convention"]
    assert any("vboost" in said for said in found.causes[1].evidence)
    assert found.causes[0].share_s == pytest.approx(found.gap_s, abs=0.02)
    assert any(said.startswith("program: ") and "NeMo" in said for said in found.causes[0].evidence)


def test_a_smaller_batch_is_compared_for_as_many_sequences(tmp_path: Path) -> None:
    base = run(tmp_path / "base", mean_s=8.0)
    assert base.recipe
    gbs = base.recipe.layout.gbs
    small = run(tmp_path / "small", gpu_record(overrides=Overrides(gbs=gbs // 4)), mean_s=3.0)
    found = explain(small, base)
    assert found
    assert found.reference_s == pytest.approx(2.0)
    assert shares(found) == {"layout": pytest.approx(1.0)}
    assert any(line.startswith("layout.gbs: ") for line in found.causes[0].evidence)


def test_a_trace_beside_the_run_is_used(tmp_path: Path) -> None:
    slow = run(tmp_path)
    parts = dict.fromkeys(("attention_s", "other_s", "memory_copy_s", "communication_hidden_s", "idle_longest_s"), 0.0)
    busy = {"matrix_product_s": 1.0, "communication_exposed_s": 0.5, "idle_s": 0.5}
    traced = StepBreakdown(step=47, rank=0, duration_s=2.0, collectives=(), **busy, **parts)
    RunFolder(slow.path).breakdown.write_text(json.dumps(asdict(traced)))
    assert shares(explain(slow, verdict=UNJUDGED)) == {
        "exposed_communication": pytest.approx(MEAN_S / 4),
        "host_bound": pytest.approx(MEAN_S / 4),
    }


def test_clocks_that_were_throttled_while_it_trained_are_a_cause(tmp_path: Path) -> None:
    def gpu(us: float, reason: str = "sw_power_cap") -> GpuState:
        return GpuState(node="node1", index=3, throttled_us={reason: us})

    throttled_s = 50 * MEAN_S / 2
    seen = environment(SXM).model_copy(update={"gpus": (gpu(5e6),), "gpus_at_end": (gpu(5e6 + throttled_s * 1e6),)})
    record = gpu_record().model_copy(update={"environment": seen})
    found = explain(run(tmp_path, record), verdict=UNJUDGED)
    assert shares(found) == {"throttled_clocks": pytest.approx(MEAN_S / 2)}
    assert found
    assert found.causes[0].evidence[0].startswith("GPU 3 of node1: sw_power_cap for ")


def test_samples_of_the_window_count_before_counters_of_the_whole_run(tmp_path: Path) -> None:
    seen = GpuState(node="node1", index=0, uuid="GPU-a", max_sm_clock_mhz=1980, throttled_us={"sw_power_cap": 0.0})
    after = seen.model_copy(update={"throttled_us": {"sw_power_cap": 1e9}})
    both = environment(SXM).model_copy(update={"gpus": (seen,), "gpus_at_end": (after,)})
    slow = run(tmp_path, gpu_record().model_copy(update={"environment": both}))
    own = "hw_thermal_slowdown"
    gpus = [
        Sample(
            time_s=FIRST_STEP_S + time,
            host=HostSample(),
            gpus=GpuSamples(sm_clock_mhz=(1485.0,), throttle_reasons=((own,),)),
        )
        for time in range(700)
    ]
    start = SamplerStart(node="node1", cores=1, interval_s=1.0, gpus=(SampledGpu(index=0, uuid="GPU-a"),))
    folder = RunFolder(slow.path)
    folder.resources.mkdir()
    folder.resources_of("node1").write_bytes(b"".join(map(to_line, (start, *gpus))))
    assert slow.record
    finish_run(folder, slow.record, End(0))
    found = explain(recorded_run(read_folder(folder)), verdict=UNJUDGED)
    assert shares(found) == {"throttled_clocks": pytest.approx(MEAN_S / 4)}
    assert found
    assert found.causes[0].evidence == (f"GPU 0 of node1: {own} in 100 % of the samples, SM clock 1485 of 1980 MHz",)


def test_what_no_file_tells_is_not_known(tmp_path: Path) -> None:
    ended = run(tmp_path)
    (ended.path / "metrics.jsonl").unlink()
    found = explain(ended, verdict=UNJUDGED)
    assert found
    assert found.causes == ()
    unknown = {item.name for item in found.not_known}
    narrow = shown_lines(explanation_tables(found)[-1])
    assert any("metrics.jsonl with steps  pretrain_llama3.1 -s 8b" in line for line in narrow), "no column of one word"
    assert unknown == {"slow_rank", "exposed_communication", "host_bound", "data_bound", "logging", "throttled_clocks"}


def test_a_hung_run_is_judged_by_what_its_ranks_and_nccl_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    folder = RunFolder(write_run(tmp_path, gpu_record(), [13.0] * 3))
    said = "rank 3 on node1 has hung for 300 s at step 3, in no collective; NCCL: rank 3 on node1 (process 4103, GPU 3)"
    folder.log.write_text(f"llmb: stall: {said} has launched 40 AllReduce operations, 1 fewer than others\n")
    finish_run(folder, read_record(folder), End(1))
    printed = CliRunner().invoke(app, ["judge", str(folder.path), "--explain"]).stdout
    assert said in " ".join(printed.split())


def test_a_failed_run_has_no_explanation(tmp_path: Path) -> None:
    folder = write_run(tmp_path, gpu_record(), [13.0] * 3, exit_code=1)
    assert explain(recorded_run(read_folder(RunFolder(folder)))) is None


def test_tables_fit_a_terminal_and_commands_are_complete(tmp_path: Path) -> None:
    waiting = run(tmp_path, data_wait_s=1.0, host_ahead_s=0.0)
    found = explain(waiting)
    assert found
    tables: list[Table] = explanation_tables(found)
    assert max(map(len, shown_lines(tables))) <= 80
    text = lines(found)
    assert any("waiting for data" in line and "≤ 1" in line for line in text)
    command = "llmb run -w pretrain_llama3.1 -s 8b --dtype bf16 --gpu-type h100 --scale 8 --synthetic"
    assert any(line.startswith(f"to confirm waiting for data: {command}") for line in text)
    assert waiting.record
    other = explain(replace(waiting, record=waiting.record.model_copy(update={"program": "megatron_bridge"})))
    assert other
    assert "-s 8b --framework megatron_bridge --dtype" in other.causes[0].confirm


def test_the_command_explains_each_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    run(tmp_path / "slow", data_wait_s=1.0, host_ahead_s=0.0)
    run(tmp_path / "base", mean_s=12.0)
    words = [str(tmp_path / "slow"), "--against", str(tmp_path / "base"), "--explain"]
    (judged,) = json.loads(CliRunner().invoke(app, ["judge", *words, "--json"]).stdout)["judged"]
    found = judged["explanation"]
    assert [cause["name"] for cause in found["causes"]] == ["data_bound", "host_bound"]
    assert found["gap_s"] == pytest.approx(1.15)
    assert found["unexplained_s"] == pytest.approx(0.15)
    assert {"share_s", "share_pct", "bound", "evidence", "confirm"} <= found["causes"][0].keys()
    printed = CliRunner().invoke(app, ["judge", *words]).stdout
    assert "why slow" in printed
    assert "waiting for data" in printed
    without = json.loads(CliRunner().invoke(app, ["judge", *words[:-1], "--json"]).stdout)
    assert without["judged"][0]["explanation"] is None


NODES = ("node1", "node2", "node3", "node4")


def with_settings(values: dict[str, str], **others: dict[str, str]) -> RunRecord:
    """A run on four nodes; ``others`` are values of nodes by name."""
    each = {node: NodeSettings(values=values | others.get(node, {}), missing={}) for node in NODES}
    return gpu_record(scale=32, nodes=NODES).model_copy(update={"settings": together(each)})


def test_a_drifted_sysctl_is_the_first_cause_of_what_nothing_measured_explains(tmp_path: Path) -> None:
    usual = {"sysctl.vm.zone_reclaim_mode": "0", "sysctl.vm.dirty_ratio": "20", "kernel.release": "6.1"}
    before = [run(tmp_path, with_settings(usual), mean_s) for mean_s in (13.0, 13.01, 12.99)]
    drifted = with_settings(usual | {"sysctl.vm.zone_reclaim_mode": "1", "sysctl.vm.dirty_ratio": "40"})
    (judged,) = judge_against([run(tmp_path, drifted, 14.0, data_wait_s=0.3)], before, "before")
    assert "sysctl.vm.zone_reclaim_mode differs" in judged.verdict.sentence
    found = explain_judged(judged)
    assert found
    assert found.causes[0].name == "settings"
    assert found.causes[0].share_s == pytest.approx(found.gap_s)
    assert found.causes[0].evidence == ("sysctl.vm.zone_reclaim_mode: 1, reference 0",), "dirty_ratio costs no time"
    compared = compare_runs(RunSet("before", tuple(before)), RunSet("after", judged.runs)).differences
    assert [item.key for item in compared[:2]] == ["sysctl.vm.zone_reclaim_mode", "sysctl.vm.dirty_ratio"]


def test_a_drifted_setting_is_named_beside_what_it_may_be_behind(tmp_path: Path) -> None:
    usual = {"interface.eth0.mtu": "9000"}
    before = run(tmp_path, with_settings(usual), 13.0)
    slow = run(tmp_path, with_settings({"interface.eth0.mtu": "1500"}), 14.0, outside_layers_s=1.0)
    found = explain(slow, before)
    assert list(shares(found).items()) == [("settings", None), ("exposed_communication", pytest.approx(1.0))]
    assert "settings" not in shares(explain(run(tmp_path, with_settings({"interface.eth0.mtu": "1500"}), 13.0), before))


def test_settings_that_one_side_does_not_tell_are_no_cause(tmp_path: Path) -> None:
    before = run(tmp_path, gpu_record(scale=32, nodes=NODES), 13.0)
    after = run(tmp_path, with_settings({"cpu.governor": "powersave"}), 14.0)
    assert "settings" not in shares(explain(after, before))
    found = compare_runs(RunSet("before", (before,)), RunSet("after", (after,)))
    assert "cpu.governor" not in [item.key for item in found.differences]


def test_another_driver_on_one_node_is_the_first_cause_and_makes_the_verdict_soft(tmp_path: Path) -> None:
    usual = {"software.driver": "570.124.06"}
    slow = run(tmp_path, with_settings(usual, node2={"software.driver": "575.57.08"}), 14.0, data_wait_s=0.3)
    found = explain(slow)
    assert found
    said = "GPU driver is 575.57.08 on node2 and 570.124.06 on node1, node3, node4"
    assert (found.causes[0].name, found.causes[0].evidence) == ("unlike_nodes", (said,))
    before = [run(tmp_path, with_settings(usual), mean_s) for mean_s in (13.0, 13.01, 12.99)]
    (judged,) = judge_against([slow], before, "before")
    assert judged.verdict.soft
    assert f"nodes unlike each other in yours: {said}" in judged.verdict.sentence
    (calm,) = judge_against([before[0]], before[1:], "before")
    assert "unlike" not in calm.verdict.sentence
