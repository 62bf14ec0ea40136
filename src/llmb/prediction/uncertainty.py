# SPDX-License-Identifier: Apache-2.0
"""The sources of a prediction's interval: fitted rates by term of the step, and expected errors. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from llmb.catalogue.schema import FittedRate
from llmb.prediction.prediction import Prediction, predicted_terms
from llmb.prediction.step_time import TERMS

HALF_WIDTH = 1.96
"""Standard deviations in half of a 95 % interval."""
LEAST_EFFECT = 1e-6
LABELS = {**TERMS, "ep_hidden": TERMS["ep"]}
EFFICIENCY, REST = "efficiency of this GPU type", "not attributable to a term"
Basis = Literal["fitted rate", "held-out steps", "assumed"]


@dataclass(frozen=True, slots=True)
class ErrorSource:
    """A source of the interval: a term of the step with fitted rates, or an expected error."""

    source: str
    basis: Basis
    pct: float
    """Half the width of the interval that it alone would cause, in percent of the step."""
    share: float
    """Fraction of the squared half-width."""


def error_sources(prediction: Prediction) -> list[ErrorSource]:
    """Return the sources of a prediction's interval, the largest first; their shares sum to 1."""
    case, *aspects = prediction.errors.values()
    named = {REST: case, **{each.text: each for each in aspects}}
    by_term = _variances(prediction) if prediction.calibration.error == "model" else {}
    fitted = HALF_WIDTH**2 * sum(by_term.values())
    shares = dict.fromkeys([*by_term, *named], 0.0)
    for side in (0, 1):
        squares = {name: each.log_errors[side] ** 2 for name, each in named.items()}
        of_rates = min(fitted, squares[REST])
        squares[REST] -= of_rates
        squares |= {name: of_rates * HALF_WIDTH**2 * each / fitted for name, each in by_term.items()}
        for name, square in squares.items():
            shares[name] += square / sum(squares.values()) / 2
    basis: dict[str, Basis] = {
        name: "assumed" if each.rows is None else "held-out steps" for name, each in named.items()
    }
    found = [
        ErrorSource(name, basis.get(name, "fitted rate"), prediction.error_pct * math.sqrt(share), share)
        for name, share in shares.items()
    ]
    return sorted(found, key=lambda each: -each.share)


def _variances(prediction: Prediction) -> dict[str, float]:
    """Return, by term, the variance that its rates cause in the logarithm of the step time."""
    found: dict[str, float] = {}
    for fit in prediction.calibration.fits:
        effects = {name: _effect(prediction, name, rate) for name, rate in fit.items() if _matters(prediction, name)}
        names = [name for name, effect in effects.items() if abs(effect) > LEAST_EFFECT]
        covariance = [
            [effects[one] * effects[other] * _correlation(fit, one, other) for other in names] for one in names
        ]
        labels = [LABELS.get(name, EFFICIENCY) for name in names]
        for label, share in _shapley(covariance, labels):
            found[label] = found.get(label, 0.0) + share
    return found


def _matters(prediction: Prediction, name: str) -> bool:
    return LABELS[name] in prediction.terms if name in LABELS else prediction.gpu.gpu_type in name.split()


def _effect(prediction: Prediction, name: str, rate: FittedRate) -> float:
    """Return the change of the logarithm of the step time if the rate is one standard deviation larger."""
    gpu, usual, larger = prediction.gpu, prediction.calibration, 1 + rate.deviation
    if name in usual.rates:
        usual = replace(usual, rates={**usual.rates, name: larger * usual.rates[name]})
    else:
        gpu = gpu.model_copy(update={"relative_efficiency": larger * (gpu.relative_efficiency or 1.0)})
    return math.log(sum(predicted_terms(prediction.plan, gpu, usual).values()) / prediction.seconds)


def _correlation(fit: Mapping[str, FittedRate], one: str, other: str) -> float:
    listed = fit[one].correlations.get(other) or fit[other].correlations.get(one, 0.0)
    return 1.0 if one == other else listed


def _shapley(covariance: Sequence[Sequence[float]], labels: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield each label's Shapley effect on the variance of a sum of correlated normal variables (Owen and Prieur,
    2017)."""
    groups = [*dict.fromkeys(labels)]
    of_group = [[place for place, label in enumerate(labels) if label == group] for group in groups]
    with_sum = [[*row, sum(row)] for row in covariance]
    with_sum.append([sum(column) for column in zip(*with_sum, strict=True)])

    @cache
    def remaining(known: int) -> list[list[float]]:
        """Return the covariance, with the sum as last variable, if the groups in the bits of ``known`` are known."""
        if not known:
            return with_sum
        last = known.bit_length() - 1
        found = remaining(known ^ 1 << last)
        for place in of_group[last]:
            found = _given(found, place)
        return found

    number = len(groups)
    for place, label in enumerate(groups):
        total = 0.0
        for known in range(1 << number):
            if not known >> place & 1:
                orders = math.factorial(known.bit_count()) * math.factorial(number - known.bit_count() - 1)
                total += orders * (remaining(known)[-1][-1] - remaining(known | 1 << place)[-1][-1])
        yield label, total / math.factorial(number)


def _given(covariance: list[list[float]], known: int) -> list[list[float]]:
    """Return the covariance of normal variables given the value of the variable with index ``known``."""
    row, variance = covariance[known], covariance[known][known]
    if variance <= 0:
        return covariance
    return [[each - other[known] * of / variance for each, of in zip(other, row, strict=True)] for other in covariance]
