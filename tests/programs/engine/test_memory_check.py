# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits is known before it starts, and refused only by a count."""

import pytest

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.errors import UsageError
from llmb.predict.memory import clearly_fits, estimate
from llmb.programs.engine.program import check_memory, memory_warnings
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan


def planned(layers: int = 2, sequences: int = 1, **choices: str) -> EnginePlan:
    """A run of one micro-batch in each step."""
    overrides = Overrides(layers=layers, mbs=sequences, gbs=sequences)
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=1, overrides=overrides)
    return make_plan(resolve(Catalogue(), request), Choices(**choices), device="cuda")


def test_a_run_that_fits_is_not_counted() -> None:
    said: list[str] = []
    check_memory(planned(), said.append, force=False)
    assert said == []
    assert list(memory_warnings(planned())) == []


def test_a_run_on_a_cpu_is_not_checked() -> None:
    request = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu")
    plan = make_plan(resolve(Catalogue(), request), Choices(), device="cpu")
    said: list[str] = []
    check_memory(plan, said.append, force=False)
    assert said == []
    assert list(memory_warnings(plan)) == []


def test_a_run_is_forced_without_a_count() -> None:
    said: list[str] = []
    check_memory(planned(24), said.append, force=True)
    assert len(said) == 1
    assert "needs about" in said[0]
    assert "--force" in said[0]
    (warning,) = memory_warnings(planned(24))
    assert "may not fit" in warning


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_run_that_does_not_fit_is_refused_once_it_is_counted() -> None:
    """One of few layers and many sequences needs some GiB more than there are, and recomputes them if told to."""
    plan = planned(4, 13)
    use = estimate(plan)
    assert not use.fits
    assert not clearly_fits(use)
    said: list[str] = []
    with pytest.raises(UsageError, match=r"does not fit: rank 0 needs [\d.]+ of 80 GiB on stage 0") as raised:
        check_memory(plan, said.append, force=False)
    assert "--recompute" in str(raised.value.do)
    assert "counting" in said[0]
    check_memory(planned(4, 13, recompute="full"), said.append, force=False)
