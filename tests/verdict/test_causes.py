# SPDX-License-Identifier: Apache-2.0
"""Causes are ranked by what they cost, and never invented."""

from dataclasses import replace
from typing import Any

import pytest
from fake_steps import step_of
from verdict_samples import run_with_times

from llmb.base.missing import Missing
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.readers.profiles.breakdown import CollectiveTime, StepBreakdown
from llmb.runs.rank_times import Excess, RankTime, RankTimes, rank_excess
from llmb.runs.result import Condition, Reference
from llmb.runs.steps import ExpertLoad, Step
from llmb.verdict.causes import Evidence, ExpertWork, ReferenceEvidence, Throttle, Work, cause_rules
from llmb.verdict.explain_run import Explanation, explain_evidence

WORDS = {
    "run": "/runs/1",
    "command": "llmb run -w w -s s",
    "last_rank": "3",
    "workload": "w",
    "size": "s",
    "gpu_type": "h100",
}
SIZES = Overrides(layers=8, gbs=8, mbs=1)
LAYOUT = resolve(
    Catalogue(), Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=4, overrides=SIZES)
).layout
NAMES = ("input_us", "copy_us", "layer_us", "wait_us")
WORK = Work(ranks=4, on_gpu=False, layer_passes=16, recompute="none")


def step(number: int, **values: Any) -> Step:
    return step_of(number, **values)


def ranks(rank: int = 2, *, layer_s: float = 0.01, input_s: float = 0.0, turns: bool = False, count: int = 8) -> Excess:
    """Four ranks, one of which is slower; with ``turns``, each in its turn."""
    own = RankTime(input_s, 0.0, layer_s, 0.0)
    steps = [[RankTime(0.0, 0.0, 0.01, 0.0)] * 4 for _ in range(count)]
    for number, step in enumerate(steps):
        step[number % 4 if turns else rank] = own
    parts = [[tuple(1e6 * one for one in part) for part in zip(*step, strict=True)] for step in steps]
    lines = [
        RankTimes(first_step=number, last_step=number, **dict(zip(NAMES, of_step, strict=True)))
        for number, of_step in enumerate(parts)
    ]
    found = rank_excess(lines, LAYOUT, same_layers=True)
    assert isinstance(found, Excess)
    return found


def evidence(work: Work = WORK, *, count: int = 8, slow: Excess | Missing | None = None, **values: Any) -> Evidence:
    """Of a run without anything slow in it, but for ``values`` of every step and the ``slow`` rank."""
    steps = [step(number, **values) for number in range(count)]
    run = run_with_times([1.0], step_times_s=[1.0 + number % 2 / 1000 for number in range(20)])
    times = ranks(layer_s=0.01) if slow is None else slow
    return Evidence(run=run, steps=steps, work=work, ranks=times, node_of={2: "node7"}, trained_s=float(count))


def differs(key: str, own: str, other: str) -> Condition:
    return Condition(key=key, own=own, reference=other, effect="noted")


def reference(*differing: Condition, step_time_s: float = 0.5, **values: Any) -> ReferenceEvidence:
    figure = Reference(kind="baseline", step_time_s=step_time_s, source="the baseline", window_text="the last step")
    return ReferenceEvidence(reference=figure, differing=differing, **values)


def explained(run: Evidence, against: ReferenceEvidence | None = None) -> Explanation:
    return explain_evidence(run, against, WORDS)


def names(explanation: Explanation) -> list[str]:
    return [cause.name for cause in explanation.causes]


def trace(**values: Any) -> StepBreakdown:
    parts = ("attention", "matrix_product", "other", "memory_copy", "communication_exposed", "idle")
    zeros = {f"{part}_s": 0.0 for part in (*parts, "communication_hidden")}
    always = {"step": 5, "rank": 0, "duration_s": 2.0, "idle_longest_s": 0.0, "collectives": ()}
    return StepBreakdown(**{**always, **zeros, **values})


def test_a_run_with_nothing_slow_has_no_causes() -> None:
    found = explained(evidence())
    assert names(found) == []
    assert found.gap_s is found.unexplained_s is found.reference is None


def test_other_work_is_named_first_whatever_the_rest_costs() -> None:
    """Two runs at once wait for each other in every collective, which looks like slow communication."""
    faults = {"other_work": ("another run: llmb.engine.worker in /b",)}
    busy = replace(evidence(outside_layers_s=0.4), run=run_with_times([1.0], faults=faults))
    for against in (None, reference(evidence=busy)):
        first = explained(busy, against).causes[0]
        assert (first.name, first.share_s, first.evidence) == ("other_work", None, faults["other_work"])
    assert names(explained(busy))[1:] == ["exposed_communication"]
    quiet = evidence()
    assert names(explained(quiet)) == []


def test_the_network_is_named_before_other_work() -> None:
    both = replace(
        evidence(data_wait_s=0.4),
        run=run_with_times([1.0], faults={"network_fault": ("NCCL used TCP sockets",), "other_work": ("another run",)}),
    )
    assert names(explained(both)) == ["network", "other_work", "data_bound"]
    slower = reference(differs("fabric", "TCP sockets", "InfiniBand"))
    first = explained(evidence(), slower).causes[0]
    assert (first.name, first.share_s) == ("network", pytest.approx(0.5))


SLOW_RANK = {"slow": ranks(layer_s=0.02)}


@pytest.mark.parametrize(
    ("values", "cause", "share_s"),
    [
        (SLOW_RANK, "slow_rank", 0.16),
        ({"data_wait_s": 0.3}, "data_bound", 0.3),
        ({"pause_s": 0.25}, "logging", 0.25),
        ({"outside_layers_s": 0.2}, "exposed_communication", 0.2),
    ],
)
def test_what_the_steps_show_is_a_cause_with_its_share(values: dict[str, Any], cause: str, share_s: float) -> None:
    (found,) = explained(evidence(**values)).causes
    assert found.name == cause
    assert found.share_s == pytest.approx(share_s)
    assert found.share_pct == pytest.approx(100 * share_s)
    assert found.in_step == (cause != "logging")
    assert "{" not in found.confirm


UNEVEN = ExpertLoad(max_over_mean=3.0, idle_experts=0, layers_rank_max_over_mean=(1.5, 1.0))
EXPERTS = ExpertWork(flops_share=0.8, rows=1000, exchanged_bytes=4 * 2 * 256, passes=3)


def test_ranks_wait_for_the_one_whose_experts_have_the_most_rows() -> None:
    """Of a forward pass of 1.2 s, evenly loaded experts would take 0.8 s; the others wait 0.2 s, three times a step."""
    work = replace(WORK, experts=EXPERTS, layer_passes=120)
    (found,) = explained(evidence(work, expert_load=UNEVEN)).causes
    assert (found.name, found.bound) == ("expert_imbalance", "about")
    assert found.share_s == pytest.approx(3 * 1.2 * 0.2 / 1.2)
    assert found.evidence[:2] == (
        "the fullest rank computes 1.25 times as many rows of experts as the mean, up to 1.5 times in a layer",
        "that is 250 rows more in each layer and micro-batch, and 0.512 MB more to receive and to send back",
    )
    even = replace(UNEVEN, layers_rank_max_over_mean=(1.0, 1.0))
    assert names(explained(evidence(work, expert_load=even))) == []
    assert names(explained(evidence(expert_load=UNEVEN))) == []
    (unknown,) = explained(evidence(work)).not_known
    assert (unknown.name, unknown.reason) == (
        "expert_imbalance",
        "the rows of experts that each rank computes were not recorded",
    )


def test_routing_that_differs_from_the_reference_is_the_load_of_experts() -> None:
    """The part that is measured is not suspected again."""
    work, routed = replace(WORK, experts=EXPERTS, layer_passes=120), differs("expert_rows", "as routed", "even")
    suspected = explained(evidence(), reference(routed)).causes
    assert [(cause.name, cause.share_s) for cause in suspected] == [("expert_imbalance", pytest.approx(0.5))]
    (measured,) = explained(evidence(work, expert_load=UNEVEN), reference(routed)).causes
    assert measured.share_s == pytest.approx(0.6)


def test_causes_are_in_the_order_of_their_shares() -> None:
    found = explained(evidence(**SLOW_RANK, data_wait_s=0.3, pause_s=0.05, outside_layers_s=0.1))
    assert names(found) == ["data_bound", "slow_rank", "exposed_communication", "logging"]


def test_the_slow_rank_is_named_with_its_node() -> None:
    (found,) = explained(evidence(**SLOW_RANK)).causes
    assert found.evidence[0].startswith("rank 2 on node7 is the slowest in 8 of 8 steps")
    assert found.bound == "at least"
    assert "--profile-ranks 0-3" in found.confirm


def test_what_the_slow_rank_alone_waits_for_is_no_wait_of_all() -> None:
    found = explained(evidence(slow=ranks(input_s=0.3), data_wait_s=0.3))
    assert [(cause.name, cause.share_s) for cause in found.causes] == [("slow_rank", pytest.approx(0.3))]
    assert found.causes[0].evidence[0].endswith("the slowest in 8 of 8 steps; beyond the median rank: input 300.0 ms")


def test_ranks_that_take_turns_in_being_slowest_are_no_slow_rank() -> None:
    assert names(explained(evidence(slow=ranks(layer_s=0.02, turns=True)))) == []


def test_a_rank_hardly_slower_than_the_others_is_no_slow_rank() -> None:
    least = 0.01 * (1 + cause_rules().slower_layer_pct.value / 100)
    assert names(explained(evidence(slow=ranks(layer_s=least * 0.999)))) == []
    assert names(explained(evidence(slow=ranks(layer_s=least * 1.3)))) == ["slow_rank"]


def test_layers_that_cannot_be_compared_name_no_rank() -> None:
    found = explained(evidence(slow=Missing("its ranks cannot be compared")))
    assert names(found) == []
    assert [unknown.name for unknown in found.not_known] == ["slow_rank"]


def test_one_rank_neither_waits_nor_communicates() -> None:
    found = explained(evidence(replace(WORK, ranks=1), **SLOW_RANK, outside_layers_s=0.5))
    assert names(found) == []
    assert not {"slow_rank", "exposed_communication"} & {unknown.name for unknown in found.not_known}


def test_a_trace_tells_of_communication_and_scales_it_to_the_step() -> None:
    collective = CollectiveTime("all_gather", "dp", 3, 1.0, 0.6, 0.4)
    traced = trace(communication_exposed_s=0.8, collectives=(collective,))
    (found,) = explained(replace(evidence(), trace=traced)).causes
    assert (found.name, found.share_s, found.bound) == ("exposed_communication", pytest.approx(0.4), "about")
    assert "longest: all-gather of dp 600.0 ms" in found.evidence


def test_waiting_for_a_slow_rank_is_not_counted_twice() -> None:
    traced = trace(communication_exposed_s=0.8, rank=0)
    found = explained(replace(evidence(**SLOW_RANK), trace=traced))
    assert {cause.name: pytest.approx(cause.share_s) for cause in found.causes} == {
        "exposed_communication": 0.4 - 0.16,
        "slow_rank": 0.16,
    }
    of_slow = explained(replace(evidence(**SLOW_RANK), trace=replace(traced, rank=2)))
    assert of_slow.causes[0].share_s == pytest.approx(0.4)


def test_steps_that_save_are_compared_with_those_that_do_not() -> None:
    saving = [step(number, saving=number % 2 == 0, step_time_s=1.4 if number % 2 == 0 else 1.0) for number in range(8)]
    run = replace(evidence(replace(WORK, saves=True)), steps=saving)
    (found,) = explained(run).causes
    assert (found.name, found.in_step, found.share_s) == ("checkpoint", True, pytest.approx(0.2))
    assert "during 4 of 8 steps, which take 400.0 ms longer" in found.evidence[0]


def test_pauses_of_a_run_that_saves_are_those_of_its_checkpoints() -> None:
    (found,) = explained(evidence(replace(WORK, saves=True), pause_s=0.3, saving=True)).causes
    assert (found.name, found.in_step, found.bound) == ("checkpoint", False, "at least")


def test_full_recomputation_costs_the_forward_passes_of_the_layers() -> None:
    (full,) = explained(evidence(replace(WORK, recompute="full"))).causes
    assert (full.name, full.share_s, full.bound) == ("recomputation", pytest.approx(0.16), "about")
    (selective,) = explained(evidence(replace(WORK, recompute="selective"))).causes
    assert selective.bound == "at most"


def with_stalls(*numbers: int, **values: Any) -> Evidence:
    times = [1.0 + number % 2 / 1000 + 0.5 * (number in numbers) for number in range(20)]
    steps = [step(number, step_time_s=time, **values) for number, time in enumerate(times)]
    return replace(evidence(), steps=steps, run=run_with_times([1.0], step_times_s=times))


def test_single_slow_steps_are_stalls() -> None:
    (found,) = explained(with_stalls(7, 12)).causes
    assert (found.name, found.share_s) == ("stalls", pytest.approx(0.05, rel=0.01))
    assert found.evidence[0].startswith("slow steps: 7, 12; up to 501.0 ms slower")
    (log,) = explained(replace(with_stalls(7, 12), steps=(), work=None)).causes
    assert log.evidence[0].startswith("slow steps: 2 of 20; up to 501.0 ms slower")


def test_stalls_at_a_regular_distance_say_so() -> None:
    assert "every 5 steps" in explained(with_stalls(2, 7, 12, 17)).causes[0].evidence


def test_slow_steps_that_save_or_wait_for_data_are_no_stalls() -> None:
    assert "stalls" not in names(explained(with_stalls(7, 12, saving=True)))
    assert names(explained(with_stalls(7, 12, data_wait_s=0.6))) == ["data_bound"]


GPU = replace(WORK, on_gpu=True)


def test_on_a_gpu_data_that_the_host_waits_for_cost_nothing_while_the_queue_is_full() -> None:
    assert names(explained(evidence(GPU, data_wait_s=0.4, host_ahead_s=0.5))) == []
    late = explained(evidence(GPU, data_wait_s=0.4, host_ahead_s=0.0))
    assert names(late) == ["data_bound", "host_bound"]
    assert late.causes[1].share_s is None, "how long the GPU is idle is in a trace only"


def test_a_trace_tells_how_long_a_gpu_is_idle() -> None:
    run = replace(evidence(GPU, host_ahead_s=0.0), trace=trace(idle_s=0.5))
    assert {cause.name: cause.share_s for cause in explained(run).causes} == {"host_bound": 0.25}


def test_throttled_clocks_cost_no_more_than_the_time_they_were_throttled() -> None:
    throttled = (Throttle("GPU 3 of node7", "sw_power_cap", 2.0), Throttle("GPU 1 of node7", "gpu_idle", 8.0))
    (found,) = explained(replace(evidence(GPU, host_ahead_s=0.5), throttled=throttled)).causes
    assert (found.name, found.bound, found.share_s) == ("throttled_clocks", "at most", pytest.approx(0.25))
    assert found.evidence == ("GPU 3 of node7: sw_power_cap for 2.0 s of the run",)
    assert names(explained(replace(evidence(GPU, host_ahead_s=0.5), throttled=()))) == []


def test_sampled_clocks_tell_how_much_slower_a_gpu_is() -> None:
    """A power cap that is always active costs no more than the clocks that it takes."""
    throttled = (
        Throttle("GPU 3 of node7", "sw_power_cap", None, 1.0, 1782.0, 1980.0),
        Throttle("GPU 1 of node7", "sw_power_cap", None, 0.4, 1881.0, 1980.0),
        Throttle("GPU 1 of node7", "gpu_idle", None, 1.0, 1000.0, 1980.0),
    )
    run = replace(evidence(GPU, host_ahead_s=0.5), throttled=throttled)
    (found,) = explained(run).causes
    assert (found.bound, found.share_s) == ("at most", pytest.approx(0.1 * run.mean_s))
    assert found.evidence == (
        "GPU 3 of node7: sw_power_cap in 100 % of the samples, SM clock 1782 of 1980 MHz",
        "GPU 1 of node7: sw_power_cap in 40 % of the samples, SM clock 1881 of 1980 MHz",
    )


def test_without_the_highest_clock_the_share_of_samples_is_the_bound() -> None:
    throttled = (Throttle("GPU 3 of node7", "hw_slowdown", None, 0.25),)
    run = replace(evidence(GPU, host_ahead_s=0.5), throttled=throttled)
    (found,) = explained(run).causes
    assert found.share_s == pytest.approx(0.25 * run.mean_s)
    assert found.evidence == ("GPU 3 of node7: hw_slowdown in 25 % of the samples",)


def test_against_a_baseline_a_cause_is_what_the_run_has_more_of() -> None:
    run, base = evidence(data_wait_s=0.3, outside_layers_s=0.2), evidence(data_wait_s=0.1, outside_layers_s=0.2)
    found = explained(run, reference(step_time_s=0.8, evidence=base))
    assert [(cause.name, cause.share_s) for cause in found.causes] == [("data_bound", pytest.approx(0.2))]
    assert found.gap_s == pytest.approx(0.2)
    assert found.unexplained_s is None


def test_a_gap_without_a_cause_is_not_explained() -> None:
    found = explained(evidence(), reference(evidence=evidence()))
    assert found.causes == ()
    assert found.unexplained_s == pytest.approx(0.5)


def test_what_differs_takes_what_was_not_measured() -> None:
    differing = differs("layout.mbs", "1", "4")
    found = explained(evidence(data_wait_s=0.1), reference(differing, evidence=evidence()))
    assert [(cause.name, cause.share_s) for cause in found.causes] == [
        ("layout", pytest.approx(0.4)),
        ("data_bound", pytest.approx(0.1)),
    ]
    assert found.causes[0].evidence == ("layout.mbs: 1, reference 4",)
    assert found.unexplained_s is None


def test_several_differences_take_at_most_the_rest_each() -> None:
    differing = (differs("layout.mbs", "1", "4"), differs("dtype", "bf16", "fp8"), differs("nodes", "a", "b"))
    found = explained(evidence(), reference(*differing))
    assert [(cause.name, cause.bound, cause.share_s) for cause in found.causes] == [
        ("precision", "at most", 0.5),
        ("layout", "at most", 0.5),
        ("machine", "at most", None),
    ]


def test_other_nodes_or_software_take_the_rest_if_nothing_else_differs() -> None:
    found = explained(evidence(), reference(differs("software.driver", "2", "1")))
    assert [(cause.name, cause.share_s) for cause in found.causes] == [("software", 0.5)]


def test_recomputation_that_the_baseline_lacks_takes_all_that_it_costs() -> None:
    run = evidence(replace(WORK, recompute="full"))
    against = reference(differs("recompute", "full", "none"), evidence=evidence())
    (found,) = explained(run, against).causes
    assert (found.name, found.share_s) == ("recomputation", pytest.approx(0.5))


def test_the_steps_of_the_reference_window_tell_what_another_window_costs() -> None:
    found = explained(evidence(), reference(window_mean_s=0.6))
    assert [(cause.name, cause.share_s) for cause in found.causes] == [("window", pytest.approx(0.4))]
    assert found.unexplained_s == pytest.approx(0.1)


def test_another_convention_costs_no_time() -> None:
    found = explained(evidence(), reference(differs("convention", "full", "causal")))
    assert [(cause.name, cause.share_s) for cause in found.causes] == [("convention", None)]
    assert found.unexplained_s == pytest.approx(0.5)


def test_a_run_faster_than_its_reference_is_not_slow_for_what_differs() -> None:
    found = explained(evidence(), reference(differs("layout.mbs", "1", "4"), step_time_s=2.0))
    assert found.causes == ()
    assert found.gap_s == pytest.approx(-1)


def test_a_log_alone_tells_nothing_and_says_what_would() -> None:
    found = explained(Evidence(run=run_with_times([1.0])))
    assert found.causes == ()
    assert {unknown.name for unknown in found.not_known} == {
        "slow_rank",
        "exposed_communication",
        "host_bound",
        "data_bound",
        "checkpoint",
        "logging",
        "stalls",
        "recomputation",
        "throttled_clocks",
    }
    assert all(unknown.reason and unknown.confirm for unknown in found.not_known)


def test_every_cause_has_a_rule_whose_command_can_be_written() -> None:
    rules = cause_rules()
    assert all(rule.confirm.format_map(WORDS) for rule in rules.causes)
    assert len({rule.name for rule in rules.causes}) == len(rules.causes)
