# SPDX-License-Identifier: Apache-2.0
"""The interval is attributed to terms by the uncertainty of fitted rates, and to nothing else."""

import math

import numpy as np
import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.prediction.prediction import BRIDGE, Prediction, default_calibration, predict
from llmb.prediction.uncertainty import EFFICIENCY, REST, _shapley, error_sources
from llmb.runs.choices import Choices
from llmb.runs.plan import make_plan

CATALOGUE = Catalogue()


def predicted(size: str, dtype: str, gpu_type: str, scale: int, software: str, **request: str) -> Prediction:
    known = {"size": size, "dtype": dtype, "gpu_type": gpu_type, **request}
    asked = Request(workload="pretrain_llama3.1", scale=scale, **known)  # type: ignore[arg-type]
    plan = make_plan(resolve(CATALOGUE, asked), Choices(), device="cuda", trains=False)
    calibration = default_calibration(CATALOGUE.rates, software)
    return predict(plan, CATALOGUE.gpus[gpu_type], calibration, CATALOGUE.rates.errors)


@pytest.mark.parametrize("software", CATALOGUE.rates.software)
def test_sources_add_up_to_the_interval(software: str) -> None:
    prediction = predicted("70b", "fp8", "h100", 64, software)
    found = error_sources(prediction)
    assert sum(each.share for each in found) == pytest.approx(1)
    assert all(each.share >= 0 for each in found)
    assert math.hypot(*(each.pct for each in found)) == pytest.approx(prediction.error_pct)
    of_terms = {each.source for each in found if each.basis == "fitted rate"}
    assert of_terms <= {*prediction.terms}
    # What other software hides is assumed, so that no fit says how uncertain it is.
    assert ("tensor-parallel messages" in of_terms) == (software in ("documents", BRIDGE))


def test_a_step_in_bf16_on_h100_is_mostly_uncertain_by_no_single_cause() -> None:
    first, *others = error_sources(predicted("70b", "bf16", "h100", 64, "documents"))
    assert (first.source, first.basis) == (REST, "held-out steps")
    assert first.share > 0.8
    assert [each.source for each in others[:2]] == ["products bf16", "tensor-parallel messages"]


def test_the_efficiency_of_a_chip_and_assumed_aspects_are_sources() -> None:
    sharded = predicted("405b", "nvfp4", "gb200", 256, BRIDGE, release="mb-26.06")
    found = {each.source: each for each in error_sources(sharded)}
    assert found["products nvfp4"].basis == found[EFFICIENCY].basis == "fitted rate"
    assert found["NVFP4"].basis == "held-out steps"


def test_the_effect_of_correlated_variables_is_shared() -> None:
    alone = dict(_shapley([[4.0, 0.0], [0.0, 9.0]], ["a", "b"]))
    assert alone == pytest.approx({"a": 4, "b": 9})
    one, other, correlation = 2.0, -3.0, 0.5
    total = one**2 + other**2 + 2 * one * other * correlation
    covariance = [[one**2, one * other * correlation], [one * other * correlation, other**2]]
    found = dict(_shapley(covariance, ["a", "b"]))
    first = ((one + correlation * other) ** 2 + total - (other + correlation * one) ** 2) / 2
    assert found == pytest.approx({"a": first, "b": total - first})
    assert dict(_shapley(covariance, ["a", "a"])) == pytest.approx({"a": total})


def test_every_fit_has_a_covariance_and_only_rates_that_exist() -> None:
    for fit in CATALOGUE.rates.fits.values():
        names = [*fit]
        correlations = np.eye(len(names))
        for name, rate in fit.items():
            for other, value in rate.correlations.items():
                correlations[names.index(name), names.index(other)] = value
        assert np.linalg.eigvalsh(correlations).min() > 0.01
        rates = {*CATALOGUE.rates.rates, "ep", "ep_hidden"}
        assert all(name in rates or {*name.split()} <= {*CATALOGUE.gpus} for name in names)
