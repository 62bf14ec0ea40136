# SPDX-License-Identifier: Apache-2.0
"""Which recipe a request resolves to, what it leaves open, and how a wrong request is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue, layout_of
from llmb.catalogue.layout_check import check_layout, rank_stages, stage_layers
from llmb.catalogue.model_name import model_of
from llmb.catalogue.records import Dtype, Layout, Recipe, Unspecified, unspecified_text
from llmb.catalogue.resolve import Overrides, Request, bridge_releases_of, gpu_types_of, releases_of, resolve
from llmb.jobs.local_run import recipe_for
from llmb.launch.site.site import Machine
from llmb.runs.choices import Choices
from llmb.runs.experiment import experiment_name
from llmb.runs.plan import make_plan


def ask(catalogue: Catalogue, size: str = "8b", workload: str = "pretrain_llama3.1", **fields: object) -> Recipe:
    return resolve(catalogue, Request(workload=workload, size=size, **fields))


def refusal(catalogue: Catalogue, **fields: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        ask(catalogue, **fields)
    return caught.value


def test_defaults_are_the_smallest_full_layout_in_bf16(catalogue: Catalogue) -> None:
    recipe = ask(catalogue)
    assert (recipe.scale, recipe.dtype, recipe.gpu_type, recipe.release) == (8, Dtype.BF16, "h100", "25.04")
    assert (recipe.layout.dp, recipe.layout.ga) == (4, 32)


def test_tiny_runs_at_any_scale_with_the_same_batch(catalogue: Catalogue) -> None:
    layouts = [ask(catalogue, "tiny", scale=scale, gpu_type="cpu").layout for scale in (1, 2, 4, 8)]
    assert {layout.gbs for layout in layouts} == {8}
    assert [layout.ga for layout in layouts] == [8, 4, 2, 1]


def test_a_doubling_of_the_largest_scale_keeps_the_work_per_gpu(catalogue: Catalogue) -> None:
    recipe = ask(catalogue, scale=512)
    assert (recipe.layout.gbs, recipe.layout.ga, recipe.layout.dp) == (8192, 32, 256)
    assert recipe.expectations == ()
    assert recipe.expectations_reason


def test_exact_scales_are_not_doubled(catalogue: Catalogue) -> None:
    error = refusal(catalogue, workload="finetune_llama4-maverick", size="400b", scale=512)
    assert error.choices == ("256", "1 (proxy)")


@pytest.mark.parametrize(
    ("fields", "hint", "choice"),
    [
        ({"workload": "pretrain_lama3.1"}, "did you mean 'pretrain_llama3.1'", "pretrain_nemotron4"),
        ({"size": "8B"}, "did you mean '8b'", "70b"),
        ({"size": "13b"}, "unknown pretrain_llama3.1 size '13b'", "405b"),
        ({"dtype": "bf61"}, "this recipe has no dtype 'bf61'", "bf16"),
        ({"gpu_type": "v100"}, "unknown GPU type 'v100'", "h100"),
        ({"gpu_type": "cpu"}, "8b has no layout for cpu", "h100"),
        ({"release": "24.11"}, "has no release '24.11'", "25.04"),
        ({"scale": 24}, "no layout for 24 GPUs", "16"),
        ({"scale": 4}, "no layout for 4 GPUs", "8"),
        ({"scale": 1 << 60, "overrides": Overrides(gbs=1 << 60)}, f"no layout for {1 << 60:,} GPUs", "8"),
        ({"scale": 0}, "--scale is 0; it must be at least 1", "8"),
        ({"scale": 384}, "no layout for 384 GPUs", "doublings of 128"),
    ],
)
def test_a_wrong_name_lists_the_valid_ones(
    catalogue: Catalogue, fields: dict[str, object], hint: str, choice: str
) -> None:
    error = refusal(catalogue, **fields)
    assert hint in str(error) and choice in error.choices


def test_a_scale_of_another_release_names_it(catalogue: Catalogue) -> None:
    assert refusal(catalogue, size="405b", scale=576).do == "pass --release 24.11"
    assert ask(catalogue, "405b", scale=576, release="24.11").layout.pp == 9
    assert "--release" not in str(refusal(catalogue, size="405b", scale=32, dtype="mxfp8", gpu_type="b200"))


def test_an_unlisted_scale_runs_with_a_batch_of_its_own(catalogue: Catalogue) -> None:
    recipe = ask(catalogue, scale=24, overrides=Overrides(gbs=96))
    assert (recipe.layout.gpus, recipe.layout.dp, recipe.layout.ga) == (24, 12, 8)
    assert recipe.expectations == ()


def test_a_scale_between_runs_the_whole_model_even_if_the_one_below_is_a_proxy(catalogue: Catalogue) -> None:
    recipe = ask(catalogue, size="405b", scale=256, overrides=Overrides(gbs=128))
    assert (recipe.proxy, recipe.layout.layers, recipe.layout.pp) == (False, 126, 8)
    assert recipe.decisions[0] == "a custom layout, derived from the one for 512 GPUs"


@pytest.mark.parametrize(
    ("scale", "gbs"), [(576, 252), (720, 315), (1728, 756), (2304, 1008), (3456, 1512), (4608, 2016)]
)
def test_a_documents_rule_gives_the_batch_of_scales_between(catalogue: Catalogue, scale: int, gbs: int) -> None:
    """24.11: GBS is the number of GPUs x 252 / 576."""
    layout = ask(catalogue, "405b", scale=scale, release="24.11").layout
    assert (layout.gbs, layout.ga, layout.tp, layout.pp, layout.vp, layout.cp) == (gbs, 63, 8, 9, 7, 2)


def test_a_scale_of_another_release_is_advised(catalogue: Catalogue) -> None:
    assert "pass --release 24.11" in str(refusal(catalogue, size="405b", scale=1728))
    assert "is not divisible by TP x PP x CP" in str(refusal(catalogue, size="405b", scale=640, release="24.11"))


def test_overrides_are_checked_together(catalogue: Catalogue) -> None:
    error = refusal(catalogue, size="70b", scale=64, overrides=Overrides(tp=3, layers=81, gbs=7))
    for said in (
        "GPUs 64 is not divisible",
        "attention heads 64 is not divisible by TP 3",
        "layers 81 is not divisible",
    ):
        assert said in str(error)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (Overrides(tp=3), "is not divisible by TP 3"),
        (Overrides(tp=16), "number of KV heads 8 is not divisible by TP 16"),
        (Overrides(gbs=2), "GBS 2 is below MBS x DP = 1 x 4 = 4"),
        (Overrides(gbs=130), "GBS 130 is not divisible by MBS x DP"),
        (Overrides(mbs=0), "mbs is 0; it must be at least 1"),
        (Overrides(layers=-1), "layers is -1"),
        (Overrides(vp=2), "VP 2 needs PP above 1"),
        (Overrides(ep=2), "need a model with experts"),
        (Overrides(cp=4, seq_len=8190), "is not divisible by 2 x CP = 8"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(catalogue: Catalogue, overrides: Overrides, said: str) -> None:
    assert said in str(refusal(catalogue, overrides=overrides))


def test_another_gpu_type_borrows_the_layout_but_not_the_figures(catalogue: Catalogue) -> None:
    recipe = ask(catalogue, scale=8, gpu_type="b200")
    assert recipe.layout == ask(catalogue, scale=8, gpu_type="h100").layout
    assert recipe.expectations == ()
    assert recipe.peak_tflops == 2250
    assert any("published for h100" in note for note in recipe.decisions)


def test_a_changed_layout_has_no_expectation(catalogue: Catalogue) -> None:
    recipe = ask(catalogue, scale=8, overrides=Overrides(gbs=64))
    assert recipe.expectations == ()
    assert "gbs" in str(recipe.expectations_reason)
    assert ask(catalogue, scale=8, overrides=Overrides(gbs=128)).expectations


def test_fewer_layers_make_a_proxy(catalogue: Catalogue) -> None:
    recipe = ask(catalogue, scale=8, overrides=Overrides(layers=16))
    assert recipe.proxy
    assert recipe.model.layers == 16


def test_lora_knows_its_packing(catalogue: Catalogue) -> None:
    recipe = ask(catalogue, "70b", "finetune_llama3", gpu_type="gb200", scale=8)
    assert recipe.packing is not None
    assert recipe.packing.sum_of_squares == 488991
    assert [item.step_time_s for item in recipe.expectations] == [4.07, 4.229]


def test_maverick_packs_the_same_data_and_says_whose_statistics_are_counted(catalogue: Catalogue) -> None:
    recipe = ask(catalogue, "400b", "finetune_llama4-maverick", gpu_type="h100", scale=256)
    assert recipe.packing is not None
    assert (recipe.packing.sum_of_squares, recipe.packing.chunked_sum_of_squares) == (842603, None)
    assert "Llama 3's tokenizer" in recipe.packing.source


@pytest.mark.parametrize(
    ("gpu_type", "figures"), [("b200", [(0.224, True), (0.297, False)]), ("h100", [(0.297, False)]), ("gb300", [])]
)
def test_a_figure_of_a_stated_gpu_type_is_before_one_without(
    catalogue: Catalogue, gpu_type: str, figures: list[tuple[float, bool]]
) -> None:
    recipe = ask(catalogue, "400b", "finetune_llama4-maverick", gpu_type=gpu_type, scale=256)
    assert [(item.step_time_s, item.gpu_type_stated) for item in recipe.expectations] == figures
    assert recipe.expectations_reason == (None if figures else "no figure is published for bf16 on 256 gb300 GPUs")


sizes = st.integers(min_value=1, max_value=64)


@given(gpus=sizes, tp=sizes, pp=sizes, cp=sizes, mbs=sizes, gbs=sizes)
def test_a_layout_without_problems_uses_every_gpu_and_every_sample(
    gpus: int, tp: int, pp: int, cp: int, mbs: int, gbs: int
) -> None:
    model = Catalogue().models[("llama3.1", "8b")]
    layout = Layout(gpus=gpus, tp=tp, pp=pp, cp=cp, mbs=mbs, gbs=gbs, seq_len=8192, layers=32)
    if not check_layout(model, layout):
        assert layout.tp * layout.pp * layout.cp * layout.dp == gpus
        assert layout.mbs * layout.dp * layout.ga == gbs


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tp": 8}, "number of KV heads 4 is not divisible by TP 8"),
        ({"tp": 4, "seq_len": 126}, "sequence length 126 is not divisible by TP 4"),
        ({"cp": 4, "seq_len": 100}, "sequence length 100 is not divisible by 2 x CP = 8"),
        ({"tp": 4, "cp": 2, "seq_len": 132}, "sequence length of one CP rank 66 is not divisible by TP 4"),
        ({"sequence_parallel": False}, "TP 1 has no sequence parallelism to disable"),
        ({"tp": 2, "sequence_parallel": False}, "experts with TP 2 need sequence parallelism"),
        ({"tp": 2, "shared": 225}, "shared expert's FFN size 225 is not divisible by TP 2"),
    ],
)
def test_what_cannot_be_cut_evenly_is_refused(catalogue: Catalogue, changes: dict[str, int], problem: str) -> None:
    model = catalogue.models[("llama4-maverick", "tiny")]
    assert model.moe is not None
    fields = {"gpus": 8, "mbs": 1, "gbs": 8, "seq_len": 128, "layers": 4} | changes
    moe = model.moe.model_copy(update={"shared_ffn_hidden_size": fields.pop("shared", 224)})
    (found,) = check_layout(model.model_copy(update={"moe": moe}), Layout(**fields))
    assert found.startswith(problem)


def test_only_sequence_parallelism_needs_a_length_that_divides(catalogue: Catalogue) -> None:
    model = catalogue.models[("llama3.1", "tiny")]
    layout = Layout(gpus=4, tp=2, cp=2, mbs=1, gbs=8, seq_len=36, layers=4)
    assert check_layout(model, layout.model_copy(update={"sequence_parallel": False})) == []
    assert check_layout(model, layout.model_copy(update={"seq_len": 35, "cp": 1, "sequence_parallel": False})) == []
    assert check_layout(model, layout.model_copy(update={"seq_len": 35, "cp": 1})) == [
        "sequence length 35 is not divisible by TP 2"
    ]


CATALOGUE = Catalogue()


@pytest.mark.parametrize(
    ("name", "size"), [("pretrain_llama3.1_8b", None), ("pretrain_llama3.1_8b", "8b"), ("pretrain_llama3.1", "8b")]
)
def test_a_size_is_given_in_the_name_or_by_itself(name: str, size: str | None) -> None:
    assert model_of(CATALOGUE, name, size) == ("pretrain_llama3.1", "8b")


@pytest.mark.parametrize(
    ("name", "size", "what", "choices"),
    [
        ("pretrain_llama3.1", None, "the size of pretrain_llama3.1 is not specified", ("8b", "70b", "405b", "tiny")),
        ("pretrain_llama3.1_8b", "70b", "'pretrain_llama3.1_8b' has size 8b, but --size is 70b", ()),
        ("pretrain_llama3.1_9b", None, "unknown pretrain_llama3.1 size '9b'", ("8b", "70b", "405b", "tiny")),
    ],
)
def test_two_sizes_and_none_are_errors(name: str, size: str | None, what: str, choices: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        model_of(CATALOGUE, name, size)
    assert caught.value.what.startswith(what)
    assert tuple(caught.value.choices) == choices


def test_a_misspelled_name_has_the_closest_one() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'pretrain_llama3\.1_8b'"):
        model_of(CATALOGUE, "pretrain_lama3.1_8b", None)


LLAMA_405B: dict[str, Any] = {"workload": "pretrain_llama3.1", "size": "405b"}


def left_open(**fields: Any) -> dict[str, Unspecified]:
    recipe = resolve(Catalogue(), Request(**LLAMA_405B | fields))
    return {choice.name: choice for choice in recipe.unspecified}


def test_a_release_that_is_not_specified_is_named_with_the_other() -> None:
    found = left_open(scale=32)
    assert (found["release"].value, found["release"].others) == ("25.04", ("24.11",))
    assert "release" not in left_open(scale=32, release="24.11")
    assert "scale" not in found


def test_the_gpu_type_is_named_with_every_other_one() -> None:
    lora = left_open(workload="finetune_llama3", size="70b")
    assert lora["GPU type"].value == "gb200"
    assert {"b200", "h100"} <= set(lora["GPU type"].others)
    assert "GPU type" not in left_open(gpu_type="h100")


def test_the_other_scales_say_which_are_proxies() -> None:
    others = left_open(release="25.04")["scale"].others
    assert others[:2] == ("1024", "2048")
    assert {"32 (proxy)", "doublings of 2048"} <= set(others)


def test_nothing_is_left_open_by_a_complete_request() -> None:
    assert left_open(dtype="bf16", scale=512, gpu_type="h100", release="25.04") == {}


def test_what_a_machine_decides_is_detected() -> None:
    machine = Machine(gpu_names=("NVIDIA H100 80GB HBM3",) * 8, cores=64)
    recipe = recipe_for(Catalogue(), Request(workload="pretrain_llama3.1", size="8b"), machine)
    origins = {choice.name: choice.origin for choice in recipe.unspecified}
    assert origins == {"GPU type": "detected", "scale": "detected", "dtype": "default"}
    assert "GPU type h100 (detected; or h200," in unspecified_text(recipe.unspecified)


def test_a_proxy_says_so_in_its_title_its_name_and_its_record() -> None:
    one_layer = Overrides(layers=1, gbs=1)
    recipe = resolve(Catalogue(), Request(**LLAMA_405B, scale=1, gpu_type="h100", overrides=one_layer))
    assert recipe.title() == "pretrain_llama3.1 405b PROXY (1 of 126 layers) bf16 on 1 x h100"
    assert recipe.full_layers == 126
    assert experiment_name(make_plan(recipe, Choices(), device="cuda")).endswith("_gbs1_h100_proxy1of126")


def test_the_model_itself_is_no_proxy() -> None:
    recipe = resolve(Catalogue(), Request(**LLAMA_405B, scale=512))
    assert recipe.title() == "pretrain_llama3.1 405b bf16 on 512 x h100"
    assert "proxy" not in experiment_name(make_plan(recipe, Choices(), device="cuda"))


def test_a_wrong_scale_is_told_which_valid_ones_are_proxies() -> None:
    with pytest.raises(UsageError, match="no layout for 33 GPUs") as error:
        resolve(Catalogue(), Request(**LLAMA_405B, scale=33, release="24.11"))
    assert error.value.choices[:2] == ("576", "1152")
    assert {"1 (proxy)", "32 (proxy)"} <= set(error.value.choices)


def test_every_published_layout_puts_each_layer_in_one_stage() -> None:
    catalogue = Catalogue()
    for workload in catalogue.workloads.values():
        for table in (one for one in workload.layouts if one.document in (None, *catalogue.published)):
            for row in table.rows:
                layout = layout_of(table, row)
                stages = stage_layers(layout)
                assert len(stages) == layout.pp * layout.vp
                assert [layer for stage in stages for layer in stage] == list(range(layout.layers))


def test_embedding_and_loss_take_the_place_of_a_layer() -> None:
    layout = Layout(
        gpus=512, tp=8, pp=8, vp=8, cp=2, mbs=1, gbs=256, seq_len=8192, layers=126, counts_embedding_and_loss=True
    )
    sizes = [len(stage) for stage in stage_layers(layout)]
    assert sizes == [1, *[2] * 62, 1]


def test_a_proxy_may_leave_the_ends_without_layers() -> None:
    layout = Layout(
        gpus=64, tp=8, pp=4, vp=8, cp=2, mbs=1, gbs=64, seq_len=8192, layers=30, counts_embedding_and_loss=True
    )
    assert [len(stage) for stage in stage_layers(layout)] == [0, *[1] * 30, 0]


def test_a_rank_has_every_pp_th_stage() -> None:
    layout = Layout(gpus=4, pp=4, vp=2, mbs=1, gbs=4, seq_len=128, layers=8)
    assert [rank_stages(layout, rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_every_release_has_a_layout_for_a_gpu_type_or_names_the_releases_that_have(catalogue: Catalogue) -> None:
    refused = 0
    for name, workload in catalogue.workloads.items():
        for size in dict.fromkeys(table.size for table in workload.layouts):
            for gpu_type in gpu_types_of(workload, size):
                for release in (*releases_of(workload, size), *bridge_releases_of(workload, size)):
                    request = Request(workload=name, size=size, gpu_type=gpu_type, release=release)
                    try:
                        assert resolve(catalogue, request).release in (release, None)
                    except UsageError as error:
                        assert "has no layout" in str(error) and error.choices, request
                        refused += 1
    assert refused > 50
