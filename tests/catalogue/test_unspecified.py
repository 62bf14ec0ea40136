# SPDX-License-Identifier: Apache-2.0
"""What a request leaves open is said with what else was possible, and a proxy is never taken for its model."""

from typing import Any

import pytest

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Unspecified, unspecified_text
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.errors import UsageError
from llmb.jobs.local_run import recipe_for
from llmb.runs.choices import Choices
from llmb.runs.experiment import experiment_name
from llmb.runs.plan import make_plan
from llmb.site.site import Machine

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
