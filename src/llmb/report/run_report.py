# SPDX-License-Identifier: Apache-2.0
"""Results of a run, and of repeats, as tables and JSON documents."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llmb.analysis.causes import cause_rules
from llmb.catalogue.published import Expectation
from llmb.catalogue.records import Convention
from llmb.metrics.statistics import Spread, Statistics, spread_of
from llmb.metrics.throughput import MFU
from llmb.missing import Missing
from llmb.programs.conclude import EndedRun
from llmb.report.plan_report import plan_title, predicted_text
from llmb.report.recipe_report import CONVENTION_NAMES, identity_document
from llmb.report.table import (
    Column,
    Table,
    interval_of,
    known,
    number,
    number_column,
    result_table,
    table_of,
    window_sparkline,
)
from llmb.report.trace_report import network_text, shown_parts
from llmb.resources.machine import MachineReport, Unread, event_text, kind_text, machine_rules
from llmb.resources.records import HostUse, ResourceUse
from llmb.runs.checkpoints import CheckpointReport
from llmb.runs.plan import Plan, PredictedStep
from llmb.runs.result import NOT_SAMPLED, PretendedRank, Result
from llmb.runs.steps import Step
from llmb.shown_text import listed
from llmb.traces.breakdown import shares
from llmb.verdict.judgement import headline

STATES = {"faulty": "FAULTY NODE", "doubtful": "DOUBTFUL NODE"}


def machine_rows(machine: MachineReport) -> Iterator[tuple[str, str]]:
    """What is wrong."""
    for events in machine.kinds:
        yield STATES[events[0].state], kind_text(events)


def machine_note(machine: MachineReport | Missing) -> str:
    """Beside the state: whether anything rose, and what could not be read."""
    if isinstance(machine, Missing):
        return machine.reason
    unread = "; ".join(f"{one.what}{_where(one)}: {one.reason}" for one in machine.unread)
    found = "" if machine.events else "no counter of errors rose"
    return "; ".join(filter(None, (found, unread and f"not read: {unread}")))


def machine_table(machine: MachineReport) -> Table:
    """An event a row, then what could not be read."""
    table = result_table("Nodes meanwhile", "node", "what", "state", "seen", "to do")
    for event in machine.events:
        kind = machine_rules().kinds[event.kind].title
        table.add_row(event.node, kind, event.state, event_text(event), event.advice)
    if machine.events_left_out:
        table.add_row("", f"{machine.events_left_out} more", "", "", "")
    for one in machine.unread:
        table.add_row(listed(one.nodes), one.what, "unknown", f"not read: {one.reason}", "")
    if not table.rows:
        table.add_row("all", "counters of errors and the kernel's log", machine.state, "nothing rose", "")
    return table


def _where(one: Unread) -> str:
    return f" of {listed(one.nodes)}" if len(one.nodes) > 1 else ""


SOURCES = {
    "gpu_counter": "by the GPUs' counters",
    "gpu_power": "by their sampled power",
    "cpu_package": "of the CPU packages",
}


def run_document(run: EndedRun) -> dict[str, Any]:
    """The JSON of ``llmb run``; its keys are a contract."""
    plan, result = run.plan, run.result
    return {
        **identity_document(plan.recipe),
        "id": run.record.id,
        "label": run.record.label,
        "run_dir": str(run.folder.path),
        "origin": plan.origin.document(),
        **result.document(),
        "window": (result.window or plan.window).model_dump(mode="json"),
        "expectations": [expectation.model_dump(mode="json") for expectation in plan.recipe.expectations],
        "expectations_reason": plan.recipe.expectations_reason,
        "predicted": plan.predicted and plan.predicted.model_dump(mode="json"),
    }


def run_table(plan: Plan, result: Result, steps: Sequence[Step] = ()) -> Table:
    """The verdict, then measured and published values, one row per metric; with ``steps`` a line of their times."""
    window = result.window or plan.window
    title = f"{plan_title(plan)}, steps {window.first}-{window.last} of {plan.last_step + 1}"
    table = result_table(
        "\n".join(filter(None, (title, headline(result.verdict) if result.verdict else ""))),
        "metric",
        "measured",
        "published",
        "note",
        right=("measured", "published"),
    )
    table.columns[1].wrap = False
    expected = next(iter(plan.recipe.expectations), None)
    for name, text in _warnings(result):
        table.add_row(name, "", "", text)
    table.add_row("weights", "", "", plan.origin.weights.text)
    table.add_row("data", "", "", plan.origin.data.text)
    for name, text in _content_rows(plan, result):
        table.add_row(name, "", "", text)
    _add_step_time(table, result, expected, plan.recipe.expectations_reason)
    if plan.predicted:
        table.add_row("step time s, predicted", "", "", _predicted_note(plan.predicted, result))
    if line := window_sparkline(steps, window):
        table.add_row("step times, [window]", "", "", line)
    _add_throughput(table, result, expected)
    if result.loss:
        table.add_row("loss", f"{number(result.loss.first)} -> {number(result.loss.last)}", "", "first -> last step")
    _add_memory(table, plan, result)
    for name, text, note in resource_rows(result.resources) if result.resources else ():
        table.add_row(name, text, "", note)
    machine = result.machine
    if machine != NOT_SAMPLED:  # which was chosen
        table.add_row("nodes meanwhile", machine.state if machine else "unknown", "", machine_note(machine))
    _add_counters(table, result)
    if result.attention_backend:
        table.add_row("attention backend", result.attention_backend)
    _add_expert_load(table, result)
    _add_fp8(table, result)
    _add_checkpoint(table, result)
    _add_profile(table, result)
    return table if expected else table.without(table.columns[2:3])


def _warnings(result: Result) -> Iterator[tuple[str, str]]:
    """What has to be known to read the figures, and the network."""
    if result.measurement_reason:
        yield "NOT A MEASUREMENT", result.measurement_reason
    if result.note:
        yield "note", result.note
    if result.untried:
        yield "UNTRIED", result.untried
    for fault in result.network.faults if result.network else ():
        yield "NETWORK", fault
    if result.machine:
        yield from machine_rows(result.machine)
    if result.other_work and result.other_work.disturbing:
        yield "OTHER WORK", "; ".join(result.other_work.disturbing)
    if result.network:
        yield "network", network_text(result.network)


def _content_rows(plan: Plan, result: Result) -> Iterator[tuple[str, str]]:
    """What sequences hold, and how much of the model is trained."""
    if plan.dataset:
        packed = plan.dataset.packed
        yield "dataset", f"template {packed.template}, tokenizer {packed.tokenizer.name}, {packed.packs:,} packs"
    if packing := result.packing:
        tokens, squares = number(packing.tokens), number(packing.sum_of_squares)
        of = plan.recipe.layout.seq_len
        yield "sequences", f"{tokens} of {of} tokens real, squared lengths {squares}: {packing.source}"
    count = result.parameters
    if count:
        active = f" ({count.active:,} active)" if count.active != count.total else ""
        yield "parameters", f"{count.trainable:,} trainable of {count.total:,}{active}"


def _add_step_time(table: Table, result: Result, expected: Expectation | None, reason: str | None) -> None:
    times = result.step_time_s
    if result.pretended:
        _add_compute_time(table, result.pretended)
        return
    if isinstance(times, Missing):
        table.add_row("step time s", "n/a", "", times.reason)
        return
    source = f"{expected.source} line {expected.line}" if expected else reason or "no published figure"
    table.add_row("step time s, mean", number(times.mean), number(expected.step_time_s) if expected else "n/a", source)
    _add_spread(table, "step time s", times)


def _predicted_note(predicted: PredictedStep, result: Result) -> str:
    times = result.step_time_s
    if result.pretended or isinstance(times, Missing):
        return predicted_text(predicted)
    low, high = predicted.ci95_s
    inside = "inside" if low <= times.mean <= high else "outside"
    far = 100 * (times.mean / predicted.step_time_s - 1)
    return f"{predicted_text(predicted)}; measured is {far:+.1f} % from it, {inside} of that"


def _add_spread(table: Table, name: str, times: Statistics) -> None:
    table.add_row(f"{name}, median", number(times.median))
    if times.std is not None and times.cv is not None and times.ci95 is not None:
        table.add_row(f"{name}, std", number(times.std), "", f"coefficient of variation {100 * times.cv:.2g} %")
        table.add_row(f"{name}, 95 %", interval_of(times.ci95), "", "confidence interval of the mean")


def _add_compute_time(table: Table, rank: PretendedRank) -> None:
    """In place of a step time, of a rank that ran alone."""
    table.add_row("PRETEND", "", "", "the other ranks did nothing: no step time, throughput or loss")
    times, name = rank.compute_time_s, "compute time s"
    if isinstance(times, Missing):
        table.add_row(name, "n/a", "", times.reason)
        return
    note = f"of rank {rank.rank} in a step, on stage {rank.pp_stage}; collectives are copies of its own values"
    table.add_row(f"{name}, mean", number(times.mean), "", note)
    table.add_row(f"{name}, micro-batch", number(times.mean / rank.micro_batches), "", f"of {rank.micro_batches}")
    _add_spread(table, name, times)


def _add_throughput(table: Table, result: Result, expected: Expectation | None) -> None:
    if result.tokens_per_s is None:
        return
    tflops_per_gpu, mfu_pct, reasons = result.tflops_per_gpu or {}, result.mfu_pct or {}, result.reasons or {}
    padded = ", padded" if result.packing else ""
    published_tokens = number(expected.tokens_per_s) if expected else "n/a"
    table.add_row(f"tokens/s{padded}", number(result.tokens_per_s), published_tokens)
    if result.packing:
        table.add_row("tokens/s, real", number(result.real_tokens_per_s), "", "without padding")
    table.add_row(f"tokens/s per GPU{padded}", number(result.tokens_per_s_per_gpu))
    for convention in Convention:
        tflops = tflops_per_gpu.get(convention)
        if tflops is not None:
            table.add_row(f"TFLOPS per GPU, {CONVENTION_NAMES[convention]}", number(tflops))
    for convention in Convention:
        mfu = mfu_pct.get(convention)
        if mfu is not None:
            published = expected.mfu_pct if expected and convention == Convention.PUBLISHED else None
            table.add_row(f"MFU %, {CONVENTION_NAMES[convention]}", number(mfu), number(published) if published else "")
    for name, reason in reasons.items():
        figure, _, counted_by = name.partition(".")
        if figure == MFU:
            named = f", {CONVENTION_NAMES[Convention(counted_by)]}" if counted_by else ""
            table.add_row(f"MFU %{named}", "n/a", "", reason)
    days = result.days_per_1t_tokens
    expected_days = number(expected.days_per_1t_tokens) if expected and expected.days_per_1t_tokens else "n/a"
    table.add_row("days per 1T tokens", number(days), expected_days, reasons.get("days_per_1t_tokens", ""))


def _add_counters(table: Table, result: Result) -> None:
    if counters := result.counters:
        note = "loss or gradient norm; the first ends a run"
        table.add_row("non-finite steps", str(counters.non_finite_steps), "", note)
        table.add_row("skipped steps", str(counters.skipped_steps), "", "parameters not updated")


def _add_expert_load(table: Table, result: Result) -> None:
    load = result.expert_load
    if load is None:
        return
    chosen = "forced to balance" if load.forced else "as the routers chose"
    table.add_row("busiest expert / mean", number(load.max_over_mean), "", f"tokens per step, worst layer; {chosen}")
    table.add_row("experts without tokens", number(load.idle_experts), "", "all layers, mean of the steps")
    if load.capacity_factor is not None:
        limit = f"beyond capacity {load.capacity_factor:g} of an expert; every expert computes as many rows"
        table.add_row("dropped tokens", number(load.dropped_pct), "%", limit)


def _add_fp8(table: Table, result: Result) -> None:
    fp8 = result.fp8
    if fp8 is None:
        return
    if fp8.product:
        table.add_row("FP8 products", fp8.product.dtype, "", fp8.product.why)
    table.add_row("FP8 tensors saturated", number(fp8.saturated_tensors), "", "beyond their scale, mean of the steps")
    table.add_row("FP8 tensors not finite", number(fp8.not_finite_tensors), "", "mean of the steps")


def _add_checkpoint(table: Table, result: Result) -> None:
    checkpoint = result.checkpoint
    if isinstance(checkpoint, Missing):
        table.add_row("checkpoints", "n/a", "", checkpoint.reason)
    if not checkpoint:
        return
    if checkpoint.load_s is not None:
        table.add_row("checkpoint load s", number(checkpoint.load_s), "", _verification(checkpoint))
        table.add_row(
            "checkpoint load GB/s", number(checkpoint.load_gb_per_s), "", _slowest(checkpoint.slowest_load_rank)
        )
    if checkpoint.save_s:
        longest = number(max(checkpoint.save_s))
        table.add_row("checkpoint save s", longest, "", f"longest of {len(checkpoint.save_s)}, not in the step times")
        table.add_row(
            "checkpoint save GB/s", number(checkpoint.save_gb_per_s), "", _slowest(checkpoint.slowest_save_rank)
        )
    if checkpoint.overlapped_steps:
        note = f"while a checkpoint was written; {checkpoint.overlapped_steps_in_window} of them in the window"
        table.add_row("steps slowed down", str(checkpoint.overlapped_steps), "", note)
    if checkpoint.size_bytes is not None:
        table.add_row("checkpoint size GB", number(checkpoint.size_bytes / 1e9))


def _slowest(rank: int | None) -> str:
    return "" if rank is None else f"of all ranks; rank {rank} took longest"


def _verification(checkpoint: CheckpointReport) -> str:
    if checkpoint.verify_s is not None:
        return f"verified before, in {number(checkpoint.verify_s)} s"
    return "not verified: --no-verify-checkpoint" if checkpoint.verification == "skipped" else ""


def _add_profile(table: Table, result: Result) -> None:
    profile = result.profile
    if profile and (step := profile.breakdown):
        of_step = shares(step)
        for part, name in shown_parts([step]).items():
            table.add_row(f"{name} %", number(100 * of_step[part]), "", f"of step {step.step}, rank {step.rank}")
    for warning in profile.warnings if profile else ():
        table.add_row("profile", "n/a", "", warning)


def _add_memory(table: Table, plan: Plan, result: Result) -> None:
    one = result.pretended
    peak_gib, whose = (one.peak_memory_gib, f"rank {one.rank}") if one else (result.peak_memory_gib, "largest rank")
    source = "allocator" if plan.device == "cuda" else "resident set"
    table.add_row("peak memory GiB", number(peak_gib), "", f"{whose}, {source}")


def resource_rows(use: ResourceUse) -> Iterator[tuple[str, str, str]]:
    """Name, value and note. Of GPUs their power, else the busiest node's CPU; and the energy per token."""
    if use.power_w_mean is not None:
        yield "GPU power W", number(use.power_w_mean), ", ".join(_gpu_notes(use))
    else:
        yield from _host_row(use)
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


def _host_row(use: ResourceUse) -> Iterator[tuple[str, str, str]]:
    host = max(use.hosts, key=lambda host: host.cpu_pct_mean or 0.0)
    if host.cpu_pct_mean is not None:
        of = f"of {host.node}, the busiest of {len(use.hosts)}" if len(use.hosts) > 1 else "of all cores"
        yield "host CPU %", number(host.cpu_pct_mean), ", ".join([of, *_host_notes(host)])


def _host_notes(host: HostUse) -> Iterator[str]:
    if host.memory_used_gib_max is not None:
        yield f"memory at most {number(host.memory_used_gib_max)} GiB"
    for name, share in (("I/O wait", host.iowait_pct_mean), ("stolen", host.steal_pct_mean)):
        if share is not None and share >= 1:
            yield f"{name} {number(share)} %"


def repeats_document(recipes: Sequence[Sequence[EndedRun]]) -> dict[str, Any]:
    """The JSON of several runs; its keys are a contract. Recipes without a run are left out."""
    labels = {run.record.label for runs in recipes for run in runs}
    return {
        "label": labels.pop() if len(labels) == 1 else None,
        "recipes": [_recipe_document(runs) for runs in recipes if runs],
    }


def _recipe_document(runs: Sequence[EndedRun]) -> dict[str, Any]:
    spread = spread_of(_means(runs))
    return {
        "title": runs[0].plan.recipe.title(),
        "run_means_s": asdict(spread) if spread else None,
        "runs": [run_document(run) for run in runs],
    }


def repeats_tables(recipes: Sequence[Sequence[EndedRun]]) -> Iterator[Table]:
    """One table for each recipe that has a run."""
    columns: list[Column[EndedRun]] = [
        Column("run", lambda run: run.record.id),
        Column("status", lambda run: run.result.status),
        number_column("step s", lambda run: run.mean_s, known),
        number_column("CV %", _cv_pct, known),
        Column("compute s", _compute_s, known, right=True, optional=True),
        Column("peak GiB", _own_peak_gib, known, right=True, optional=True),
        Column("verdict", lambda run: run.result.verdict_name),
        Column("reason", _reason),
    ]
    for runs in filter(None, recipes):
        table = table_of(runs[0].plan.recipe.title(), runs, columns)
        spread = spread_of(_means(runs))
        table.caption = _spread_text(spread) if spread else "no run has a step time"
        yield table


def _cv_pct(run: EndedRun) -> float | None:
    times = run.result.step_time_s
    return 100 * times.cv if run.mean_s is not None and times and times.cv is not None else None


def _compute_s(run: EndedRun) -> float | None:
    """Mean of a pretended rank."""
    times = run.result.pretended.compute_time_s if run.result.pretended else None
    return times.mean if times else None


def _own_peak_gib(run: EndedRun) -> float | None:
    """That of a pretended rank alone."""
    return run.result.pretended.peak_memory_gib if run.result.pretended else None


def _reason(run: EndedRun) -> str | None:
    times = run.result.step_time_s
    return run.result.reason or (times.reason if isinstance(times, Missing) else None)


def _spread_text(spread: Spread) -> str:
    if spread.std is None:
        return f"1 successful run, {number(spread.mean)} s"
    return (
        f"mean of {spread.count} runs {number(spread.mean)} s, median {number(spread.median)} s, "
        f"std {number(spread.std)} s ({number(spread.cv_pct or 0)} %), "
        f"from {number(spread.min)} to {number(spread.max)} s"
    )


def _means(runs: Sequence[EndedRun]) -> list[float]:
    return [run.mean_s for run in runs if run.mean_s is not None]
