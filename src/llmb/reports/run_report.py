# SPDX-License-Identifier: Apache-2.0
"""Results of a run, and of repeats, as tables and JSON documents."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from llmb.base.missing import Missing
from llmb.base.shown_text import listed
from llmb.base.statistics import Spread, Statistics, spread_of
from llmb.catalogue.published import Expectation
from llmb.catalogue.records import Convention
from llmb.catalogue.throughput import MFU
from llmb.launch.programs.conclude import EndedRun
from llmb.readers.logs.outcome import steps_span
from llmb.readers.profiles.breakdown import shares
from llmb.readers.samples.machine import MachineReport, event_text, kind_text, machine_rules
from llmb.readers.samples.other_work import run_text
from llmb.readers.samples.sample_records import HostUse, ResourceUse
from llmb.reports.formats import cell, interval_of, number, window_sparkline
from llmb.reports.plan_report import plan_title, predicted_text
from llmb.reports.recipe_report import CONVENTION_NAMES, identity_document
from llmb.reports.sweep_report import titles_of
from llmb.reports.table import Column, Table, fields_of, numbers, rows_table, table_of, texts
from llmb.reports.trace_report import network_text, shown_parts
from llmb.runs.checkpoint_use import CheckpointReport
from llmb.runs.plan import Plan
from llmb.runs.rank_account import OUTSIDE_GIB
from llmb.runs.result import NOT_SAMPLED, PretendedRank, Result, Verdict
from llmb.runs.steps import Step
from llmb.verdict.causes import cause_rules
from llmb.verdict.judgement import headline

STATES = {"faulty": "FAULTY NODE", "doubtful": "DOUBTFUL NODE"}


def machine_table(machine: MachineReport) -> Table:
    """Return a table with one row per event and per unreadable source."""
    kinds = machine_rules().kinds
    rows = [
        *((one.node, kinds[one.kind].title, one.state, event_text(one), one.advice) for one in machine.events),
        *([("", f"{machine.events_left_out} more")] if machine.events_left_out else []),
        *((listed(one.nodes), one.what, "unknown", f"not read: {one.reason}", "") for one in machine.unread),
    ] or [("all", "counters of errors and the kernel's log", machine.state, "nothing rose", "")]
    return rows_table("Nodes meanwhile", ("node", "what", "state", "seen", "to do"), rows)


SOURCES = {
    "gpu_counter": "by the GPUs' counters",
    "gpu_power": "by their sampled power",
    "cpu_package": "of the CPU packages",
}


def run_document(run: EndedRun) -> dict[str, Any]:
    """Return the JSON of ``llmb run``; its keys are a contract."""
    plan, result = run.plan, run.result
    return {
        **identity_document(plan.recipe),
        **fields_of(run, "record.id", "record.label", "run_dir: folder.path"),
        "origin": plan.origin.document(),
        **result.document(),
        "window": result.window or plan.window,
        **fields_of(plan, "recipe.expectations", "recipe.expectations_reason", "predicted"),
        **fields_of(plan, "predicted_reason: recipe.prediction_problem"),
    }


Row = tuple[str, ...]
"""A metric with its measured and published values, and a note."""
DETAILS = re.compile(
    "(weights|data|dataset|sequences|parameters|.* s, (median|std)|TFLOPS .*|days .*|GPU power W|host CPU %|energy .*|"
    "nodes meanwhile|attention backend|busiest .*|experts .*|dropped .*|FP8 .*): |(non-finite|skipped) steps: 0$"
)
"""Matches rows that only some readers need, and counters that are 0."""
ORIGIN = ("weights", "data", "dataset", "sequences")
"""Rows about the weights and data of fine-tuning."""


def answer_text(result: Result, verdict: Verdict | None) -> str:
    """Return one line with the measurement, its reference and the outcome, as far as they are known."""
    if not result.step_time_s:
        return headline(verdict) if verdict else ""
    measured = f"{number(result.step_time_s.mean)} s a step, {number(result.tokens_per_s)} tokens/s"
    if verdict is None:
        return f"{measured}; {result.measurement_reason or 'not compared'}"
    if verdict.reference:
        return f"{measured}; {headline(verdict)}"
    why = (verdict.reason or "").rpartition("; ")[2]
    return f"{measured}; no figure to compare with yet: {why} ('llmb run --repeats 3' makes them)"


def run_table(
    plan: Plan, result: Result, steps: Sequence[Step] = (), *, answer: str = "", brief: bool = False
) -> Table:
    """Return a table with one row per metric, measured and published. The title begins with the answer or else the
    verdict.

    With ``steps``, a row has a sparkline of their times. If ``brief``, rows that only some readers need are omitted."""
    window = result.window or plan.window
    title = f"{plan_title(plan)}, {steps_span(window.first, window.last)} of {plan.last_step + 1}"
    expected = plan.recipe.figure
    rows = [
        *((name, "", "", text) for name, text in _conditions(plan, result)),
        *_step_time_rows(plan, result, expected),
        *([("step times, [window]", "", "", line)] if (line := window_sparkline(steps, window)) else []),
        *_throughput_rows(result, expected),
        *_use_rows(plan, result),
        *_engine_rows(result),
        *_checkpoint_rows(result.checkpoint),
        *_profile_rows(result),
    ]
    if brief:
        needed = () if plan.recipe.task == "pretrain" else ORIGIN
        rows = [row for row in rows if row[0] in needed or not DETAILS.match(f"{row[0]}: {row[1]}")]
    head = answer or (headline(result.verdict) if result.verdict else "")
    table = rows_table(
        "\n".join(filter(None, (head, title))),
        ("metric", "measured", "published", "note"),
        rows,
        right=("measured", "published"),
    )
    table.columns[1].wrap = False
    return table if expected else table.without(table.columns[2:3])


def add_other_runs(table: Table, result: Result) -> None:
    """Add rows for other runs on the nodes, with their programs and folders, which pages omit."""
    for node in result.other_work.nodes if result.other_work else ():
        for run in node.runs:
            table.add_row("other run", *[""] * (len(table.columns) - 2), f"{run_text(run)}, on {node.node}")


def _conditions(plan: Plan, result: Result) -> Iterator[tuple[str, str]]:
    warnings = {"NOT A MEASUREMENT": result.measurement_reason, "note": result.note, "UNTRIED": result.untried}
    yield from ((name, text) for name, text in warnings.items() if text)
    for fault in result.network.faults if result.network else ():
        yield "NETWORK", fault
    for events in result.machine.kinds if result.machine else ():
        yield STATES[events[0].state], kind_text(events)
    if result.other_work and result.other_work.disturbing:
        yield "OTHER WORK", "; ".join(result.other_work.disturbing)
    if result.network:
        yield "network", network_text(result.network)
    yield "weights", plan.origin.weights.text
    yield "data", plan.origin.data.text
    if plan.dataset:
        packed = plan.dataset.packed
        yield "dataset", f"template {packed.template}, tokenizer {packed.tokenizer.name}, {packed.packs:,} packs"
    if packing := result.packing:
        real = f"{number(packing.tokens)} of {plan.recipe.layout.seq_len} tokens real"
        yield "sequences", f"{real}, squared lengths {number(packing.sum_of_squares)}: {packing.source}"
    if count := result.parameters:
        active = f" ({count.active:,} active)" if count.active != count.total else ""
        yield "parameters", f"{count.trainable:,} trainable of {count.total:,}{active}"


def _step_time_rows(plan: Plan, result: Result, expected: Expectation | None) -> Iterator[Row]:
    times, name = result.step_time_s, "step time s"
    if result.pretended:
        yield from _compute_time_rows(result.pretended)
    elif isinstance(times, Missing):
        yield name, "n/a", "", times.reason
    else:
        reason = plan.recipe.expectations_reason or "no published figure"
        source = f"{expected.source} line {expected.line}" if expected else reason
        yield f"{name}, mean", number(times.mean), number(expected.step_time_s if expected else None), source
        yield from _spread_rows(name, times)
    if predicted := plan.predicted:
        note = predicted_text(predicted)
        if times and not result.pretended:
            low, high = predicted.ci95_s
            inside = "inside" if low <= times.mean <= high else "outside"
            far = 100 * (times.mean / predicted.step_time_s - 1)
            note += f"; measured is {far:+.1f} % from it, {inside} of that"
        yield f"{name}, predicted", "", "", note


def _spread_rows(name: str, times: Statistics) -> Iterator[Row]:
    yield f"{name}, median", number(times.median)
    if times.std is not None and times.cv is not None and times.ci95 is not None:
        yield f"{name}, std", number(times.std), "", f"coefficient of variation {100 * times.cv:.2g} %"
        yield f"{name}, 95 %", interval_of(times.ci95), "", "confidence interval of the mean"


def _compute_time_rows(rank: PretendedRank) -> Iterator[Row]:
    yield "PRETEND", "", "", "the other ranks did nothing: no step time, throughput or loss"
    times, name = rank.compute_time_s, "compute time s"
    if isinstance(times, Missing):
        yield name, "n/a", "", times.reason
        return
    note = f"of rank {rank.rank} in a step, on stage {rank.pp_stage}; collectives are copies of its own values"
    yield f"{name}, mean", number(times.mean), "", note
    yield f"{name}, micro-batch", number(times.mean / rank.micro_batches), "", f"of {rank.micro_batches}"
    yield from _spread_rows(name, times)


def _throughput_rows(result: Result, expected: Expectation | None) -> Iterator[Row]:
    if result.tokens_per_s is None:
        return
    reasons, padded = result.reasons or {}, ", padded" if result.packing else ""
    yield f"tokens/s{padded}", number(result.tokens_per_s), number(expected.tokens_per_s if expected else None)
    if result.packing:
        yield "tokens/s, real", number(result.real_tokens_per_s), "", "without padding"
    yield f"tokens/s per GPU{padded}", number(result.tokens_per_s_per_gpu)
    for convention, name in CONVENTION_NAMES.items():
        if (tflops := (result.tflops_per_gpu or {}).get(convention)) is not None:
            yield f"TFLOPS per GPU, {name}", number(tflops)
    for convention, name in CONVENTION_NAMES.items():
        if (mfu := (result.mfu_pct or {}).get(convention)) is not None:
            published = expected.mfu_pct if expected and convention == Convention.PUBLISHED else None
            yield f"MFU %, {name}", number(mfu), number(published) if published else ""
    for key, reason in reasons.items():
        figure, _, counted_by = key.partition(".")
        if figure == MFU:
            yield f"MFU %, {CONVENTION_NAMES[Convention(counted_by)]}" if counted_by else "MFU %", "n/a", "", reason
    days = expected.days_per_1t_tokens if expected else None
    why = reasons.get("days_per_1t_tokens", "")
    yield "days per 1T tokens", number(result.days_per_1t_tokens), number(days or None), why


def _use_rows(plan: Plan, result: Result) -> Iterator[Row]:
    if result.loss:
        yield "loss", f"{number(result.loss.first)} -> {number(result.loss.last)}", "", "first -> last step"
    one = result.pretended
    peak_gib, whose = (one.peak_memory_gib, f"rank {one.rank}") if one else (result.peak_memory_gib, "largest rank")
    source = "allocator" if plan.device == "cuda" else "resident set"
    yield "peak memory GiB", number(peak_gib), "", f"{whose}, {source}"
    if left := result.device_memory:
        outside = f"{number(left.outside_gib)} GiB outside PyTorch's allocator, estimated as {number(OUTSIDE_GIB)}"
        yield "free memory GiB", number(left.free_gib), "", f"rank {left.rank}, after the first step; {outside}"
    for name, text, note in resource_rows(result.resources) if result.resources else ():
        yield name, text, "", note
    machine = result.machine
    if machine != NOT_SAMPLED:  # the user disabled sampling
        yield "nodes meanwhile", machine.state if machine else "unknown", "", _machine_note(machine)


def _machine_note(machine: MachineReport | Missing) -> str:
    if isinstance(machine, Missing):
        return machine.reason
    where = (f" of {listed(one.nodes)}" if len(one.nodes) > 1 else "" for one in machine.unread)
    unread = "; ".join(f"{one.what}{of}: {one.reason}" for one, of in zip(machine.unread, where, strict=True))
    found = "" if machine.events else "no counter of errors rose"
    return "; ".join(filter(None, (found, unread and f"not read: {unread}")))


def _engine_rows(result: Result) -> Iterator[Row]:
    if counters := result.counters:
        note = "loss or gradient norm; the first ends a run"
        yield "non-finite steps", str(counters.non_finite_steps), "", note
        yield "skipped steps", str(counters.skipped_steps), "", "parameters not updated"
    if result.attention_backend:
        yield "attention backend", result.attention_backend
    if load := result.expert_load:
        chosen = "forced to balance" if load.forced else "as the routers chose"
        yield "busiest expert / mean", number(load.max_over_mean), "", f"tokens per step, worst layer; {chosen}"
        if load.rank_max_over_mean is not None and load.layers:
            worst = max(load.layers, key=lambda each: each.rank_max_over_mean)
            note = f"rows of experts, mean of the layers; {number(worst.rank_max_over_mean)} in layer {worst.layer}"
            yield "fullest rank / mean", number(load.rank_max_over_mean), "", note
        yield "experts without tokens", number(load.idle_experts), "", "all layers, mean of the steps"
        if load.capacity_factor is not None:
            limit = f"beyond capacity {load.capacity_factor:g} of an expert; every expert computes as many rows"
            yield "dropped tokens", number(load.dropped_pct), "%", limit
    if fp8 := result.fp8:
        if fp8.product:
            yield "FP8 products", fp8.product.dtype, "", fp8.product.why
        yield "FP8 tensors saturated", number(fp8.saturated_tensors), "", "beyond their scale, mean of the steps"
        yield "FP8 tensors not finite", number(fp8.not_finite_tensors), "", "mean of the steps"


def _checkpoint_rows(checkpoint: CheckpointReport | Missing | None) -> Iterator[Row]:
    if isinstance(checkpoint, Missing):
        yield "checkpoints", "n/a", "", checkpoint.reason
    if not checkpoint:
        return
    if checkpoint.load_s is not None:
        verified = "not verified: --no-verify-checkpoint" if checkpoint.verification == "skipped" else ""
        if checkpoint.verify_s is not None:
            verified = f"verified before, in {number(checkpoint.verify_s)} s"
        yield "checkpoint load s", number(checkpoint.load_s), "", verified
        yield "checkpoint load GB/s", number(checkpoint.load_gb_per_s), "", _slowest(checkpoint.slowest_load_rank)
    if checkpoint.save_s:
        longest = f"longest of {len(checkpoint.save_s)}, not in the step times"
        yield "checkpoint save s", number(max(checkpoint.save_s)), "", longest
        yield "checkpoint save GB/s", number(checkpoint.save_gb_per_s), "", _slowest(checkpoint.slowest_save_rank)
    if checkpoint.overlapped_steps:
        note = f"while a checkpoint was written; {checkpoint.overlapped_steps_in_window} of them in the window"
        yield "steps slowed down", str(checkpoint.overlapped_steps), "", note
    if checkpoint.size_bytes is not None:
        yield "checkpoint size GB", number(checkpoint.size_bytes / 1e9)


def _slowest(rank: int | None) -> str:
    return "" if rank is None else f"of all ranks; rank {rank} took longest"


def _profile_rows(result: Result) -> Iterator[Row]:
    profile = result.profile
    if profile and (step := profile.breakdown):
        of_step = shares(step)
        for part, name in shown_parts([step]).items():
            yield f"{name} %", number(100 * of_step[part]), "", f"of step {step.step}, rank {step.rank}"
    for warning in profile.warnings if profile else ():
        yield "profile", "n/a", "", warning


def resource_rows(use: ResourceUse) -> Iterator[tuple[str, str, str]]:
    """Yield rows (name, value, note): the GPUs' power, or else the busiest node's CPU, and the energy per token."""
    host = max(use.hosts, key=lambda host: host.cpu_pct_mean or 0.0, default=None)
    if use.power_w_mean is not None:
        yield "GPU power W", number(use.power_w_mean), ", ".join(_gpu_notes(use))
    elif host and host.cpu_pct_mean is not None:
        of = f"of {host.node}, the busiest of {len(use.hosts)}" if len(use.hosts) > 1 else "of all cores"
        yield "host CPU %", number(host.cpu_pct_mean), ", ".join([of, *_host_notes(host)])
    if use.energy_j_per_token is not None and use.energy_j is not None and use.energy_source:
        note = f"{number(use.energy_j)} J in the window, {SOURCES[use.energy_source]}"
        yield "energy J/token", number(use.energy_j_per_token), note


def _gpu_notes(use: ResourceUse) -> Iterator[str]:
    yield "mean of a GPU"
    if use.sm_clock_mhz_mean is not None:
        yield f"SM clock {use.sm_clock_mhz_mean:.0f} MHz"
    if use.temperature_c_max is not None:
        yield f"at most {use.temperature_c_max:.0f} C"
    for name, share in (use.throttled or {}).items():
        if name not in cause_rules().idle_reasons and share >= 0.01:
            yield f"{name} {100 * share:.0f} %"


def _host_notes(host: HostUse) -> Iterator[str]:
    if host.memory_used_gib_max is not None:
        yield f"memory at most {number(host.memory_used_gib_max)} GiB"
    for name, share in (("I/O wait", host.iowait_pct_mean), ("stolen", host.steal_pct_mean)):
        if share is not None and share >= 1:
            yield f"{name} {number(share)} %"


def repeats_document(recipes: Sequence[Sequence[EndedRun]]) -> dict[str, Any]:
    """Return the JSON of several runs; its keys are a contract. Recipes without a run are omitted."""
    labels = {run.record.label for runs in recipes for run in runs}
    return {
        "label": labels.pop() if len(labels) == 1 else None,
        "recipes": [
            {
                "title": runs[0].plan.recipe.title(),
                "run_means_s": _spread(runs),
                "runs": [run_document(run) for run in runs],
            }
            for runs in filter(None, recipes)
        ],
    }


def repeats_tables(recipes: Sequence[Sequence[EndedRun]]) -> Iterator[Table]:
    """Yield one table per recipe that has a run."""
    columns: list[Column[EndedRun]] = [
        *texts("run: record.id", "status: result.status"),
        *numbers("step s: mean_s", form=cell),
        Column("CV %", lambda run: None if run.mean_s is None else cv_pct(run.result.step_time_s), cell),
        *numbers("compute s: result.pretended.compute_time_s.mean", form=cell, optional=True),
        *numbers("peak GiB: result.pretended.peak_memory_gib", form=cell, optional=True),
        *texts("verdict: result.verdict_name", optional=True),
        Column("reason", _reason, optional=True),
    ]
    some = [runs for runs in recipes if runs]
    for runs, title in zip(some, titles_of([runs[0].plan for runs in some]), strict=True):
        spread = _spread(runs)
        answer = _spread_text(spread) if spread else "no run has a step time"
        yield table_of(f"{answer}\n{title}", runs, columns)


def cv_pct(times: Statistics | Missing | None) -> float | None:
    """Return the coefficient of variation in percent; None if it is unknown."""
    return 100 * times.cv if times and times.cv is not None else None


def _reason(run: EndedRun) -> str | None:
    times = run.result.step_time_s
    return run.result.reason or (times.reason if isinstance(times, Missing) else None)


def _spread(runs: Sequence[EndedRun]) -> Spread | None:
    return spread_of([run.mean_s for run in runs if run.mean_s is not None])


def _spread_text(spread: Spread) -> str:
    if spread.std is None:
        return f"{number(spread.mean)} s a step, 1 successful run"
    return (
        f"{number(spread.mean)} s a step, mean of {spread.count} runs; median {number(spread.median)} s, "
        f"std {number(spread.std)} s ({number(spread.cv_pct or 0)} %), "
        f"from {number(spread.min)} to {number(spread.max)} s"
    )
