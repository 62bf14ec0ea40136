# SPDX-License-Identifier: Apache-2.0
"""Repeats, scaling and the catalogue's figures of parsed runs."""

from pathlib import Path
from typing import Any

import pytest

from llmb.base.errors import UsageError
from llmb.base.statistics import describe
from llmb.catalogue.catalogue import Catalogue
from llmb.readers.logs.configuration import experiment_configuration
from llmb.readers.logs.log_files import ParsedFile
from llmb.readers.logs.outcome import LogOutcome
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.conditions import RunIdentity
from llmb.verdict.catalogue_figures import with_catalogue_figures, with_stated
from llmb.verdict.parsed_scaling import Scaling, group_runs, scaling_of

CATALOGUE = Catalogue()
LLAMA: dict[str, Any] = {
    "workload": "pretrain_llama3.1",
    "size": "8b",
    "dtype": "bf16",
    "gpu_type": "h100",
    "program": "nemo2",
}


def layout(gpus: int, **sizes: int) -> dict[str, int]:
    """That of the published recipe unless said otherwise."""
    published = {"tp": 1, "pp": 1, "cp": 2, "vp": 1, "ep": 1, "mbs": 1, "gbs": 16 * gpus}
    return {f"layout.{name}": value for name, value in {"gpus": gpus, **published, **sizes}.items()}


def run(
    name: str,
    time: float,
    configuration: dict[str, Any],
    *,
    software: dict[str, Any] | None = None,
    status: Any = "success",
    tflops: float | None = None,
) -> AnalyzedRun:
    outcome = LogOutcome(
        status,
        "",
        step_time_s=describe([time] * 2) if status == "success" else None,
        tflops_per_gpu=describe([tflops] * 2) if tflops else None,
    )
    file = ParsedFile(Path(f"{name}.out"), outcome)
    identity = RunIdentity(configuration=configuration)
    known = AnalyzedRun(id=name, path=file.path, identity=identity, conditions=software or {}, status=status)
    return known.with_outcome(file)


def test_repeats_are_grouped_by_what_was_run_not_by_name() -> None:
    same = {**LLAMA, **layout(8)}
    runs = [run(name, time, same) for name, time in (("b", 12.4), ("a", 12.2), ("other", 12.3))]
    runs += [run("half", 9.0, {**same, "layout.gbs": 64}), run("died", 0, same, status="incomplete")]
    group, half = group_runs(runs)
    assert [one.id for one in group.runs] == ["a", "b", "other"]
    assert (group.run_means_s.count, group.run_means_s.median) == (3, 12.3)
    assert group.spread_pct == pytest.approx(100 * 0.2 / 12.3)
    assert (half.first.id, half.spread_pct, half.differs) == ("half", None, ())


def test_what_makes_groups_differ_that_look_the_same_is_named() -> None:
    same = {**LLAMA, **layout(8)}
    old, new, other = group_runs(
        [
            run("old", 12.4, same, software={"software.torch": "2.8"}),
            run("new", 12.2, same, software={"software.torch": "2.9"}),
            run("more", 12.3, {**same, "recompute": "full"}, software={"software.torch": "2.9"}),
        ]
    )
    assert {one.first.id: one.differs for one in (old, new, other)} == {
        "old": ("recompute unknown", "software.torch 2.8"),
        "new": ("recompute unknown", "software.torch 2.9"),
        "more": ("recompute full", "software.torch 2.9"),
    }


def test_runs_of_which_nothing_is_known_are_not_repeats() -> None:
    assert len(group_runs([run("a", 1.0, {}), run("b", 1.0, {})])) == 2


def only(scalings: tuple[Scaling, ...]) -> Scaling:
    (scaling,) = scalings
    return scaling


def test_measured_scales_stand_beside_the_published_ones() -> None:
    runs = [run(f"{gpus}-{repeat}", time, {**LLAMA, **layout(gpus)}) for gpus, repeat, time in TIMES]
    scaling = only(scaling_of(group_runs(runs), CATALOGUE))
    assert (scaling.kind, scaling.recipe_text, scaling.gpu_type) == ("weak", "pretrain_llama3.1 8b bf16", "h100")
    assert [row.gpus for row in scaling.rows] == [8, 16, 32, 64, 128]
    rows = {row.gpus: row for row in scaling.rows}
    assert rows[8].step_time_s == pytest.approx(12.5) and rows[8].efficiency_pct == pytest.approx(100)
    assert rows[128].efficiency_pct == pytest.approx(100 * 12.5 / 15.0)
    assert rows[128].days_per_1t_tokens == pytest.approx(1e12 * 15.0 / (2048 * 8192) / 86400)
    assert (rows[32].group, rows[32].efficiency_pct, rows[32].days_per_1t_tokens) == (None, None, None)
    assert [row.published and row.published.step_time_s for row in scaling.rows] == [12.27, 12.3, 12.32, 12.33, 12.33]
    assert rows[128].published_efficiency_pct == pytest.approx(100 * 12.27 / 12.33)


TIMES = ((8, 1, 12.4), (8, 2, 12.5), (8, 3, 13.0), (128, 1, 15.0))


def test_strong_scaling_has_one_batch_size() -> None:
    runs = [run(str(gpus), time, {**LLAMA, **layout(gpus, gbs=128)}) for gpus, time in ((8, 12.0), (16, 7.5))]
    scaling = only(scaling_of(group_runs(runs), CATALOGUE))
    assert scaling.kind == "strong"
    measured = [row for row in scaling.rows if row.group]
    assert [row.efficiency_pct for row in measured] == [pytest.approx(100), pytest.approx(80)]
    assert measured[1].published is None, "the published layout has another batch size"
    assert [row.gpus for row in scaling.rows] == [8, 16, 16, 32, 64, 128]


def test_one_scale_and_batches_of_any_size() -> None:
    assert only(scaling_of(group_runs([run("a", 1.0, {**LLAMA, **layout(8)})]), CATALOGUE)).kind is None
    runs = [run(str(gpus), 1.0, {**LLAMA, **layout(gpus, gbs=gbs)}) for gpus, gbs in ((8, 128), (16, 192))]
    assert only(scaling_of(group_runs(runs), CATALOGUE)).kind == "mixed"


def test_a_recipe_that_the_catalogue_does_not_have_scales_too() -> None:
    unknown = {**LLAMA, "workload": "pretrain_grok1", "size": "314b"}
    runs = [run(str(gpus), time, {**unknown, **layout(gpus)}) for gpus, time in ((256, 10.0), (512, 11.0))]
    scaling = only(scaling_of(group_runs(runs), CATALOGUE))
    assert [(row.gpus, row.published) for row in scaling.rows] == [(256, None), (512, None)]
    assert scaling.rows[1].efficiency_pct == pytest.approx(100 / 1.1)
    assert scaling.rows[1].days_per_1t_tokens is None, "no sequence length is known"


def test_logs_that_do_not_tell_their_scale_are_left_out() -> None:
    assert scaling_of(group_runs([run("a", 1.0, LLAMA), run("b", 1.0, {})]), CATALOGUE) == ()


def test_programs_and_gpu_types_scale_apart() -> None:
    runs = [run(name, 12.0, {**LLAMA, **layout(8), key: name}) for key, name in (("program", "x"), ("program", "y"))]
    assert len(scaling_of(group_runs(runs), CATALOGUE)) == 2


def test_a_log_of_a_recipe_gets_its_throughput_and_mfu() -> None:
    (found,) = with_catalogue_figures([run("a", 12.27, {**LLAMA, **layout(8)}, tflops=600.0)], CATALOGUE)
    assert found.tokens_per_s_per_gpu == pytest.approx(128 * 8192 / 12.27 / 8)
    assert found.days_per_1t_tokens == pytest.approx(135.43, rel=1e-3)
    assert found.mfu_pct["published"] == pytest.approx(62.5, abs=0.2)
    assert found.layout_source == "log"


def test_a_layout_that_the_log_does_not_tell_is_marked_as_assumed() -> None:
    before = run("a", 12.27, {**LLAMA, "layout.gpus": 8})
    (found,) = with_catalogue_figures([before], CATALOGUE)
    assert (before.layout_source, found.layout_source) == (None, "recipe")
    assert found.layout["gbs"] == 128 and found.layout["cp"] == 2
    (told,) = with_catalogue_figures([run("b", 12.27, {**LLAMA, **layout(8)})], CATALOGUE)
    assert found.key != told.key, "an assumption makes no repeats"


def test_another_layout_has_the_mfu_of_the_logged_rate() -> None:
    (found,) = with_catalogue_figures([run("a", 9.0, {**LLAMA, **layout(8, gbs=64)}, tflops=494.75)], CATALOGUE)
    assert found.tokens_per_s_per_gpu is None
    assert list(found.mfu_pct) == ["logged"]
    assert found.mfu_pct["logged"] == pytest.approx(50, abs=0.05)


@pytest.mark.parametrize("changes", [{"gpu_type": "h999"}, {"gpu_type": None}, {"dtype": None}, {"workload": "x"}])
def test_what_is_not_known_gives_no_figures(changes: dict[str, Any]) -> None:
    configuration = {key: value for key, value in {**LLAMA, **layout(8), **changes}.items() if value is not None}
    (found,) = with_catalogue_figures([run("a", 12.0, configuration)], CATALOGUE)
    assert (found.mfu_pct, found.tokens_per_s_per_gpu) == ({}, None)


@pytest.mark.parametrize(("gpu_type", "gpus"), [("h100", 16), ("gb200", 8), ("h999", None), (None, None)])
def test_the_gpus_of_a_log_that_tells_its_nodes_are_known_by_the_gpu_type(
    gpu_type: str | None, gpus: int | None
) -> None:
    told = {key: value for key, value in {**LLAMA, "gpu_type": gpu_type, "nodes": 2}.items() if value is not None}
    (found,) = with_catalogue_figures([run("a", 12.0, told)], CATALOGUE)
    assert (found.gpus, bool(found.mfu_pct)) == (gpus, gpus is not None)
    (told_both,) = with_catalogue_figures([run("a", 12.0, {**told, "layout.gpus": 4})], CATALOGUE)
    assert told_both.gpus == 4


@pytest.mark.parametrize(
    ("name", "gpu_type", "recipe"),
    [
        (
            "lora_llama3_70b_bf16_2nodes_tp1_pp4_cp1_vp20_ep1_etpNone_mbs1_gbs64_933609",
            "gb200",
            "finetune_llama3 70b bf16 on 8",
        ),
        (
            "sft_llama4_e128_bf16_32nodes_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_3048691",
            "h100",
            "finetune_llama4-maverick 400b bf16 on 256",
        ),
    ],
)
def test_the_documents_own_names_of_experiments_are_known(name: str, gpu_type: str, recipe: str) -> None:
    (found,) = with_catalogue_figures(
        with_stated([run("a", 4.07, experiment_configuration(name))], {"gpu_type": gpu_type}, CATALOGUE), CATALOGUE
    )
    assert f"{found.recipe_text} on {found.gpus}" == recipe
    assert found.tokens_per_s_per_gpu and found.layout_source == "log"


def test_the_gpu_type_of_the_command_is_for_logs_that_do_not_tell() -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "gpu_type"}
    found = with_stated([run("b", 1.0, silent), run("c", 1.0, {})], {"gpu_type": "b200"}, CATALOGUE)
    assert [one.text("gpu_type") for one in found] == ["b200", None]
    with pytest.raises(UsageError, match="GPU type b200 was specified, but the log reports h100"):
        with_stated([run("a", 1.0, LLAMA)], {"gpu_type": "b200"}, CATALOGUE)
