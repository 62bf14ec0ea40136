# SPDX-License-Identifier: Apache-2.0
"""Fits the rates of src/llmb/catalogue/data/rates.yaml to all published steps, and writes them there, with the errors
of predictions of steps that were held out."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from ruamel.yaml import YAML

from benchmarks.predict.published_steps import (
    GPU_TYPE,
    OTHER_GPU,
    Compared,
    PublishedStep,
    fit,
    fit_efficiency,
    from_one_node,
    from_smallest_run,
    held_out_models,
    published_steps,
)
from llmb.catalogue.catalogue import DATA, Catalogue
from llmb.catalogue.records import Gpu
from llmb.catalogue.schema import StepRate

DIGITS = 3
QUANTILE = 0.95
HELD_OUT: Mapping[str, Callable[[Sequence[PublishedStep], Gpu, Mapping[str, StepRate]], Iterable[Compared]]] = {
    "model": held_out_models,
    "node": from_one_node,
    "recipe": from_smallest_run,
}
"""By the names of errors."""


def main() -> None:
    catalogue = Catalogue()
    steps, gpu, rates = published_steps(catalogue), catalogue.gpus[GPU_TYPE], catalogue.rates.rates
    found = fit(steps, gpu, rates)
    yaml = YAML()
    yaml.width = 4096
    path = DATA / "rates.yaml"
    content = yaml.load(path.read_text())
    for name, rate in rates.items():
        if rate.prior:
            content["rates"][name]["value"] = float(f"{found[name]:.{DIGITS}g}")
            sys.stdout.write(f"{name:14s} prior {rate.prior.mean:.4g} +- {rate.prior.deviation:.4g}, fitted ")
            sys.stdout.write(f"{content['rates'][name]['value']:.4g}\n")
    for name, held_out in HELD_OUT.items():
        errors = [abs(each.error) for each in held_out(steps, gpu, rates)]
        content["errors"][name]["pct"] = round(100 * float(np.quantile(errors, QUANTILE)), 1)
        sys.stdout.write(f"{name:14s} {QUANTILE:.0%} within {content['errors'][name]['pct']} %\n")
    with path.open("w") as file:
        yaml.dump(content, file)
    sys.stdout.write(
        f"{OTHER_GPU:14s} relative_efficiency {fit_efficiency(Catalogue()):.2f}: enter it in hardware.yaml\n"
    )


if __name__ == "__main__":
    main()
