# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: options, results, plans of tiny models, and a rank that trains in this process."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.engine.data.batches import RankData, StepData, StepSource, rank_data
from llmb.engine.data.build import build_data
from llmb.engine.device import exact_fp32
from llmb.engine.loop import do_step
from llmb.engine.optimizer import AdamW, build_optimizer
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.parallel.mesh import Ranks, join_ranks
from llmb.engine.parallel.pipeline import Passes, build_passes
from llmb.engine.stages import prepare_stages
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan


def option_parser(description: str | None, **sizes: tuple[float, str]) -> argparse.ArgumentParser:
    """With an option for each size, of which the default and the help are given, ``--quick`` and ``--json``."""
    parser = argparse.ArgumentParser(description=description)
    for name, (default, text) in sizes.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few small steps: shows that it works, not how fast")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def read_options(parser: argparse.ArgumentParser, **quick: float) -> argparse.Namespace:
    """``quick``: the sizes with ``--quick``."""
    options = parser.parse_args()
    if options.quick:
        vars(options).update(quick)
    return options


def print_result(found: Any, shown: str, *, as_json: bool) -> None:  # noqa: ANN401 (a dataclass, or several)
    """A record, or several, as a JSON document or as it is shown to people."""
    document = [asdict(each) for each in found] if isinstance(found, Sequence) else asdict(found)
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if as_json else shown)
    sys.stdout.flush()


def tiny_plan(
    steps: int, sizes: Overrides | None = None, workload: str = "pretrain_llama3.1", dtype: Dtype | None = None
) -> EnginePlan:
    """Of one process on this CPU."""
    overrides = sizes or Overrides()
    request = Request(workload=workload, size="tiny", gpu_type="cpu", scale=1, dtype=dtype, overrides=overrides)
    return make_plan(resolve(Catalogue(), request), Choices(steps=steps, window="all"), device="cpu")


def join_alone(plan: EnginePlan) -> Ranks:
    """This process as the only rank."""
    # Port 0 is any free one: a port that is looked for first may be another program's when it is opened.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
    exact_fp32()
    return join_ranks(plan)


@dataclass(frozen=True, slots=True)
class Trainee:
    """One rank's part of a training."""

    plan: EnginePlan
    ranks: Ranks
    passes: Passes
    optimizers: Sequence[AdamW]
    source: RankData

    def step(self, number: int, source: StepSource | None = None) -> tuple[Tensor | None, Tensor, StepData]:
        """Trains a step, on the plan's data unless others are given."""
        return do_step(number, self.plan, self.passes, self.optimizers, source or self.source, self.ranks)


def prepare_trainee(plan: EnginePlan, ranks: Ranks, *, varlen: bool = False) -> Trainee:
    return trainee_of(prepare_stages(plan, ranks), plan, ranks, varlen=varlen)


def trainee_of(stages: list[TrainedStage], plan: EnginePlan, ranks: Ranks, *, varlen: bool) -> Trainee:
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    source = rank_data(build_data(plan), plan, ranks, varlen=varlen)
    return Trainee(plan, ranks, build_passes(stages, plan, ranks), optimizers, source)


@dataclass(frozen=True, slots=True)
class Premade(StepSource):
    """The same data in every step."""

    data: StepData

    def step(self, number: int) -> StepData:  # noqa: ARG002 (it has only one)
        return self.data
