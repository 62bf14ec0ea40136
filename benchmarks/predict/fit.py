# SPDX-License-Identifier: Apache-2.0
"""Fits the rates of src/llmb/catalogue/data/rates.yaml to published steps, and writes them there, with the errors of
predictions of steps that were held out."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from benchmarks.predict.bridge_steps import BRIDGE, CHIPS, FITTED, RATES, bridge_steps, fit_bridge
from benchmarks.predict.published_steps import (
    GPU_TYPE,
    Compared,
    PublishedStep,
    equations,
    fit,
    from_one_node,
    from_smallest_run,
    held_out_models,
    priors,
    published_steps,
)
from llmb.catalogue.catalogue import DATA, Catalogue
from llmb.catalogue.records import Gpu
from llmb.catalogue.schema import RatesFile
from llmb.prediction.prediction import rates_of

DIGITS = 3
QUANTILE = 0.95
HELD_OUT: Mapping[str, Callable[[Sequence[PublishedStep], Gpu, RatesFile], Iterable[Compared]]] = {
    "model": held_out_models,
    "node": from_one_node,
    "recipe": from_smallest_run,
}
"""By the names of errors."""
OF_SOFTWARE = ("ep", "ep_hidden")
"""Fitted rates that are of the software."""


def main() -> None:
    catalogue = Catalogue()
    steps, gpu, file = published_steps(catalogue), catalogue.gpus[GPU_TYPE], catalogue.rates
    found = fit(steps, gpu, file)
    base = {**rates_of(file, BRIDGE), **{name: found[name] for name in file.rates if name not in RATES}}
    others = fit_bridge([each for each in bridge_steps(catalogue) if each.source in FITTED], base)
    yaml = YAML()
    yaml.width = 4096
    path = DATA / "rates.yaml"
    content = yaml.load(path.read_text())
    for name, rate in file.rates.items():
        if rate.prior or name in RATES:
            content["rates"][name]["value"] = value = _rounded((others.rates if name in RATES else found)[name])
            sys.stdout.write(f"{name:14s} {value:.4g}\n")
    for name in OF_SOFTWARE:
        content["software"][BRIDGE][name] = _rounded(others.rates[name])
    for name, held_out in HELD_OUT.items():
        errors = [abs(each.error) for each in held_out(steps, gpu, file)]
        pct = round(100 * float(np.quantile(errors, QUANTILE)), 1)
        content["errors"][name] |= {"shorter_pct": pct, "longer_pct": pct}
        sys.stdout.write(f"{name:14s} {QUANTILE:.0%} within {pct} %\n")
    rows = equations(steps, gpu, file, found)[0] * np.array([found[name] for name in priors(file)])
    chips = [" ".join(gpus) for gpus in CHIPS.values()]
    content["fits"] = _flat({
        "documents": uncertainty([*priors(file)], rows), BRIDGE: uncertainty([*RATES, *chips], others.rows)
    })  # fmt: skip
    with path.open("w") as text:
        yaml.dump(content, text)
    for chip, gpus in CHIPS.items():
        efficiency = _rounded(others.efficiency[gpus[0]])
        sys.stdout.write(
            f"{chip:14s} relative_efficiency {efficiency} for {', '.join(gpus)}: enter it in hardware.yaml\n"
        )


def uncertainty(names: Sequence[str], rows: np.ndarray) -> dict[str, Any]:
    """The relative deviation of each rate, and its correlations with those before it, by the least squares of rows."""
    covariance = np.linalg.inv(rows.T @ rows)
    deviations = np.sqrt(np.diag(covariance))
    shares = np.round(covariance / np.outer(deviations, deviations), 2)
    return {
        name: {
            "deviation": _rounded(deviations[place]),
            "correlations": {
                names[other]: float(shares[place, other]) for other in range(place) if shares[place, other]
            },
        }
        for place, name in enumerate(names)
    }


def _flat(fits: Mapping[str, Mapping[str, Any]]) -> CommentedMap:
    """The mapping as one line for each rate."""
    found = CommentedMap()
    for software, rates in fits.items():
        found[software] = CommentedMap(rates)
        for name, rate in rates.items():
            found[software][name] = line = CommentedMap(rate)
            line.fa.set_flow_style()
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


if __name__ == "__main__":
    main()
