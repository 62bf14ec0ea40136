# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.model_name import split_model
from llmb.catalogue.resolve import ScaleChoices, resolve, sizes_of
from llmb.jobs.campaigns.expansion import Entry, Expansion, Selection, expand, scales_of, swept

LLAMA, NEMOTRON = "pretrain_llama3.1", "pretrain_nemotron4"
LORA, MAVERICK = "finetune_llama3", "finetune_llama4-maverick"


def expanded(catalogue: Catalogue, gpu_type: str | None = "h100", *entries: Entry, **selection: object) -> Expansion:
    asked = entries or (Entry(where="-", selection=Selection(**selection)),)
    return expand(catalogue, asked, gpu_type)


def briefly(expansion: Expansion) -> list[tuple[str, str, str, int]]:
    return [(job.request.workload, job.request.size, job.request.dtype, job.scale) for job in expansion.jobs]


def test_one_recipe_alone_takes_its_defaults(catalogue: Catalogue) -> None:
    assert briefly(expanded(catalogue, workloads=(LLAMA,), sizes=("8b",))) == [(LLAMA, "8b", "bf16", 8)]
    assert briefly(expanded(catalogue, "gb200", workloads=(f"{LORA}_70b",), dtypes=("mxfp8",)))[0][2:] == ("mxfp8", 8)
    assert briefly(expanded(catalogue, "gb300", workloads=("pretrain_gpt_oss_120b",), min_scale=True))[0][2] == "mxfp8"
    assert briefly(expanded(catalogue, "cpu", workloads=("pretrain_gpt_oss_tiny",), scales=(2,)))[0][2] == "bf16"
    assert briefly(expanded(catalogue, None, workloads=(LLAMA,), sizes=("tiny",)))[0][2] == "fp32"
    assert briefly(expanded(catalogue, "gb200", workloads=("pretrain_deepseek-v3_671b",)))[0][2] == "mxfp8"
    assert briefly(expanded(catalogue, workloads=("sft_llama3_70b",), dtypes=("bf16",)))[0][3] == 1  # a proxy


def test_what_a_list_leaves_out_is_all_of_it(catalogue: Catalogue) -> None:
    found = expanded(catalogue, workloads=(f"{LLAMA}_8b", f"{NEMOTRON}_340b"))
    llama = [(LLAMA, "8b", dtype, scale) for dtype in ("bf16", "fp8") for scale in (8, 16, 32, 64, 128)]
    nemotron = [(NEMOTRON, "340b", dtype, scale) for dtype in ("bf16", "fp8") for scale in (256, 512, 1024, 2048)]
    assert sorted(briefly(found)) == sorted(llama + nemotron)


def test_everything_that_the_cluster_has_is_found(catalogue: Catalogue) -> None:
    found = expanded(catalogue, max_scale=256)
    assert {(job.request.workload, job.request.size) for job in found.jobs} == {
        (LLAMA, "8b"),
        (LLAMA, "70b"),
        (NEMOTRON, "15b"),
        (NEMOTRON, "340b"),
        (LORA, "70b"),
        (MAVERICK, "400b"),
        ("pretrain_qwen3", "0.6b"),
        ("pretrain_qwen3", "8b"),
        ("pretrain_qwen3", "30b"),
        ("pretrain_qwen3", "235b"),
        ("sft_llama3", "70b"),
        ("pretrain_mixtral", "8x7b"),
    }
    assert all(job.scale <= 256 and job.request.gpu_type == "h100" and not job.proxy for job in found.jobs)
    assert (scales := [job.scale for job in found.jobs]) == sorted(scales, reverse=True)


def test_every_job_that_is_found_is_a_recipe(catalogue: Catalogue) -> None:
    for gpu_type in ("h100", "gb200"):
        found = expanded(catalogue, gpu_type, max_scale=4096)
        assert len(found.jobs) > 50
        for job in found.jobs:
            assert resolve(catalogue, job.request).proxy == job.proxy


def test_on_a_cpu_there_is_tiny(catalogue: Catalogue) -> None:
    found = expanded(catalogue, "cpu", max_scale=2)
    sizes = [(name, size) for name, workload in catalogue.workloads.items() for size in sizes_of(workload)]
    trained = [each for each in sizes if catalogue.is_trainable(catalogue.workloads[each[0]], each[1])]
    tiny = [(name, size) for name, size in trained if size in ("tiny", "tiny-moe")]
    assert briefly(found) == [(*each, "fp32", scale) for scale in (2, 1) for each in tiny]


def test_a_scale_below_the_smallest_is_left_out_of_a_list_only(catalogue: Catalogue) -> None:
    found = expanded(catalogue, workloads=(LLAMA,), sizes=("8b", "70b"), dtypes=("bf16",), scales=(8, 64))
    assert briefly(found) == [(LLAMA, "8b", "bf16", 64), (LLAMA, "70b", "bf16", 64), (LLAMA, "8b", "bf16", 8)]
    assert found.left_out == ["-: pretrain_llama3.1 70b bf16 has no layout below 64 GPUs"]
    alone = expanded(catalogue, workloads=(f"{LLAMA}_70b",), dtypes=("bf16",), scales=(8,))
    assert briefly(alone) == [(LLAMA, "70b", "bf16", 8)]  # which the plan refuses, with the scales that there are


def test_proxies_are_taken_where_they_are_asked_for(catalogue: Catalogue) -> None:
    found = expanded(catalogue, workloads=(LLAMA,), sizes=("405b",), dtypes=("fp8",), proxy=True, max_scale=64)
    assert [(job.scale, job.proxy) for job in found.jobs] == [(64, True), (32, True), (1, True)]
    one = expanded(catalogue, workloads=(LLAMA,), sizes=("405b",), scales=(512,), dtypes=("fp8",), proxy=True)
    assert one.problems == ["-: pretrain_llama3.1 405b fp8 has no proxy for 512 GPUs; valid: 1, 32, 64, 128"]


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ({"workloads": ("pretrain_lama3.1",)}, "unknown workload 'pretrain_lama3.1'; did you mean 'pretrain_llama3.1'"),
        ({"workloads": (f"{LLAMA}_80b",)}, "unknown pretrain_llama3.1 size '80b'; did you mean '70b'?"),
        ({"sizes": ("8B",)}, "unknown size '8B'; did you mean '8b'?"),
        ({"dtypes": ("bf61",)}, "unknown dtype 'bf61'; did you mean 'bf16'?"),
        ({"workloads": (f"{LLAMA}_8b",), "gpu_type": "h1000"}, "unknown GPU type 'h1000'; did you mean 'h100'?"),
        ({"workloads": (LLAMA,), "sizes": ("8b",), "release": "25.4"}, "pretrain_llama3.1 8b has no release '25.4'"),
        ({"workloads": (LLAMA, NEMOTRON), "max_scale": 4}, "no recipe has the requested size, scale and GPU type"),
    ],
)
def test_wrong_names_are_told_with_the_closest(catalogue: Catalogue, selection: dict[str, object], words: str) -> None:
    found = expanded(catalogue, **selection)
    assert not found.jobs
    assert words in found.problems[0]


def test_every_name_of_a_model_is_split(catalogue: Catalogue) -> None:
    for name, workload in catalogue.workloads.items():
        assert split_model(catalogue, name) == (name, None)
        for size in sizes_of(workload):
            assert split_model(catalogue, f"{name}_{size}") == (name, size)
    with pytest.raises(UsageError):
        split_model(catalogue, "")


LISTED = ScaleChoices((8, 16, 64), (1, 2), "double")


def test_scales_within_limits() -> None:
    assert scales_of(Selection(max_scale=300), LISTED) == [8, 16, 64, 128, 256]
    assert scales_of(Selection(max_scale=300, exact_scales=True), LISTED) == [8, 16, 64]
    assert scales_of(Selection(max_scale=300), LISTED._replace(above_largest="refuse")) == [8, 16, 64]
    assert scales_of(Selection(max_scale=16, min_scale=True), LISTED) == [8]
    assert scales_of(Selection(min_scale=True, proxy=True), LISTED) == [1]
    assert scales_of(Selection(scales=(64, 8, 64), max_scale=32), LISTED) == [8]
    assert scales_of(Selection(max_scale=4), LISTED) == []


@given(
    st.sets(st.integers(1, 4096), min_size=1, max_size=6),
    st.integers(1, 10_000),
    st.booleans(),
    st.sampled_from(["double", "refuse", "any"]),
)
def test_no_scale_is_above_the_limit_and_none_is_lost(full: set[int], limit: int, exact: bool, above: str) -> None:
    found = scales_of(Selection(max_scale=limit, exact_scales=exact), ScaleChoices(tuple(sorted(full)), (), above))
    assert all(scale <= limit for scale in found)
    assert found == sorted(set(found))
    assert set(found) >= {scale for scale in full if scale <= limit}
    extra = set(found) - full
    assert all(scale % max(full) == 0 and not exact and above != "refuse" for scale in extra)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.text("xyz", min_size=1), min_size=1, max_size=3, unique=True))
)
def test_a_sweep_is_every_combination_once(options: dict[str, list[str]]) -> None:
    found = list(swept({name: tuple(values) for name, values in options.items()}))
    expected = 1
    for values in options.values():
        expected *= len(values)
    assert len(found) == len({tuple(item.items()) for item in found}) == expected
    assert all(len(values) == 1 and values[0] in options[name] for item in found for name, values in item.items())


def test_options_that_take_several_values_are_not_swept() -> None:
    assert list(swept({"a": ("1", "2"), "b": ("x",)}, {"a"})) == [{"a": ("1", "2"), "b": ("x",)}]


@pytest.mark.parametrize(
    ("repeats", "options", "scales", "says"),
    [
        (1_000_000_000, {}, (8,), "1,000,000,000 repeats would be more than 10,000 jobs"),
        (
            10,
            dict.fromkeys(("tp", "pp", "gbs"), tuple(map(str, range(1, 1001)))),
            (8,),
            "of 1,000,000,000 combinations would be",
        ),
        (10_000, {}, tuple(range(8, 10_000, 8)), "there are more than 10,000 jobs"),
    ],
)
def test_jobs_are_counted_before_they_are_made(
    catalogue: Catalogue, repeats: int, options: dict[str, tuple[str, ...]], scales: tuple[int, ...], says: str
) -> None:
    selection = Selection(workloads=("pretrain_llama3.1",), sizes=("8b",), dtypes=("bf16",), scales=scales)
    entry = Entry(where="-", selection=selection, repeats=repeats, options=options)
    expansion = expanded(catalogue, "h100", entry)
    assert [says in problem for problem in expansion.problems] == [True]
    assert len(expansion.jobs) <= 20_000


def test_entries_behind_the_last_possible_job_are_not_expanded(catalogue: Catalogue) -> None:
    """Each would add its jobs, and a line with the same problem."""
    selection = Selection(workloads=("pretrain_llama3.1",), sizes=("8b",), dtypes=("bf16",), scales=(8,))
    entries = [Entry(where=str(number), selection=selection, repeats=6_000) for number in range(50)]
    expansion = expanded(catalogue, "h100", *entries)
    assert expansion.problems == ["1: there are more than 10,000 jobs; split them into several campaigns"]
    assert len(expansion.jobs) == 12_000


def test_groups_are_queued_in_turn_and_every_second_round_backwards(catalogue: Catalogue) -> None:
    selection = Selection(workloads=(f"{LLAMA}_8b",), dtypes=("bf16",), scales=(8,))
    entries = [
        Entry(where="1", selection=selection, repeats=3, options={"label": ("before",)}),
        Entry(where="2", selection=selection, repeats=3, options={"label": ("after",), "tp": ("2",)}),
    ]
    jobs = expand(catalogue, entries, "h100").jobs
    turn = ["before", "after"]
    assert [job.options["label"][0] for job in jobs] == [*turn, *reversed(turn), *turn]
    assert [job.repeat for job in jobs] == [1, 1, 2, 2, 3, 3]
    assert ["tp" in job.options for job in jobs[:2]] == [False, True]
