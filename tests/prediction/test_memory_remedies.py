# SPDX-License-Identifier: Apache-2.0
"""Changes with which a run that does not fit its GPUs would."""

from functools import partial
from typing import Any

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.prediction.memory import estimate
from llmb.prediction.prediction import DOCUMENTS, predicted_seconds
from llmb.prediction.search import remedies
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.plan import EnginePlan, make_plan


def planned(size: str, scale: int, choices: dict[str, Any], sizes: dict[str, int]) -> EnginePlan:
    overrides = Overrides(**sizes)
    request = Request(workload="pretrain_llama3.1", size=size, gpu_type="h100", scale=scale, overrides=overrides)
    return make_plan(resolve(Catalogue(), request), Choices(**choices), device="cuda")


@pytest.mark.parametrize(
    ("size", "scale", "sizes"),
    [
        ("405b", 512, {"mbs": 2}),
        ("405b", 512, {"tp": 4}),
        ("8b", 8, {"cp": 1, "mbs": 2}),
        ("8b", 8, {"seq_len": 65536}),
    ],
)
def test_a_remedy_is_options_with_which_the_same_run_fits(size: str, scale: int, sizes: dict[str, int]) -> None:
    assert not estimate(planned(size, scale, {}, sizes)).fits
    found = remedies(planned(size, scale, {}, sizes))
    assert 2 <= len(found) <= 3
    for remedy in found:
        words = remedy.options.replace("--no-keep-logits", "--keep-logits no").split()
        given = dict(zip(words[::2], words[1::2], strict=True))
        choices: dict[str, Any] = {"recompute": given.pop("--recompute", "none")}
        choices |= {"keep_logits": False} if given.pop("--keep-logits", None) else {}
        if sharding := given.pop("--dp-sharding", None):
            sync = {"gradient_sync": given.pop("--gradient-sync")} if "--gradient-sync" in given else {}
            choices["parallelism"] = Parallelism(dp_sharding=sharding, **sync)
        changed = planned(size, scale, choices, {**sizes, **{name[2:]: int(value) for name, value in given.items()}})
        assert changed.recipe.layout.gbs == planned(size, scale, {}, sizes).recipe.layout.gbs
        use = estimate(changed)
        assert use.fits
        assert use.needed_gib == pytest.approx(remedy.needed_gib)
        assert remedy.cost


def test_single_changes_come_first_and_none_is_repeated_with_another() -> None:
    priced = remedies(planned("405b", 512, {}, {"tp": 4}), partial(predicted_seconds, Catalogue(), software=DOCUMENTS))
    assert all(remedy.slower_pct is not None and -5 < remedy.slower_pct < 60 for remedy in priced)
    found = [{*remedy.options.split("--")[1:]} for remedy in priced]
    assert [len(options) for options in found] == sorted(len(options) for options in found)
    assert not any(one < other for one in found for other in found)


def test_nothing_is_promised_where_nothing_suffices() -> None:
    assert remedies(planned("70b", 8, {"recompute": "full"}, {"layers": 80, "pp": 1, "vp": 1, "gbs": 8})) == []
