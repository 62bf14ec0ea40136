# SPDX-License-Identifier: Apache-2.0
"""The program that is started once per rank: torchtitan's trainer with a recipe's model, on llmb's synthetic tokens.

``python -m llmb.launch.programs.torchtitan.titan_worker RUN_FOLDER ARGUMENTS...`` accepts the arguments of
``torchtitan.train``. Ranks connect and select samples as llmb's engine does.
"""

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Generator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmb.base.errors import LlmbError
from llmb.base.parent_death import end_with_parent
from llmb.engine.data.batches import TrainingData, rank_samples
from llmb.engine.data.build import build_data
from llmb.engine.device import local_device
from llmb.engine.environment import describe_environment
from llmb.engine.parallel.mesh import Groups, Ranks, connect_ranks, leave_ranks
from llmb.engine.profile import StepProfiler
from llmb.engine.watchdog import Progress
from llmb.launch.programs.torchtitan.arguments import check_versions, package_version
from llmb.launch.programs.torchtitan.models import NAME, titan_model
from llmb.launch.programs.torchtitan.on_cpu import replace_device_functions
from llmb.readers.samples.host import host_name
from llmb.runs.failure import failure_line
from llmb.runs.folder import RunFolder, write_atomically
from llmb.runs.plan import EnginePlan
from llmb.runs.record import engine_plan, read_record

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The inputs, by name, and the labels of a micro-batch or, with pipeline stages, of a step."""


def train(folder: RunFolder, arguments: list[str]) -> None:
    end_with_parent()
    check_versions(package_version(NAME), torch.__version__)
    plan = engine_plan(read_record(folder))
    device = local_device(plan.device)
    if plan.device == "cpu":
        replace_device_functions()
    log_on_one_rank(plan)
    config = importlib.import_module("torchtitan.config").ConfigManager().parse_args(arguments)
    connect_ranks(device, timedelta(seconds=config.comm.init_timeout_seconds))
    ranks = ranks_alone(device)
    record_environment(folder, ranks)
    profiler = StepProfiler(plan, folder, ranks, Progress(0))
    batches = Batches(plan, profiler)
    register_model(plan, batches)
    trainer = importlib.import_module("torchtitan.train").Trainer(config)
    try:
        trainer.train()
        batches.close()
        profiler.close()
    finally:
        trainer.close()


def log_on_one_rank(plan: EnginePlan) -> None:
    """Set up torchtitan's logging; only the first rank of the last stage, which has the loss, logs at level INFO."""
    importlib.import_module("torchtitan.tools.logging").init_logger()
    layout = plan.recipe.layout
    if int(os.environ["RANK"]) != layout.gpus // layout.pp * (layout.pp - 1):
        logging.disable(logging.INFO)


def ranks_alone(device: torch.device) -> Ranks:
    """Return this rank among all ranks, without the groups of a layout: torchtitan makes its own."""
    world = dist.get_world_size()
    mesh = Groups().mesh(device, {"world": world})
    return Ranks(dist.get_rank(), world, device, mesh, mesh, mesh, mesh)


def record_environment(folder: RunFolder, ranks: Ranks) -> None:
    """Write the environment of all ranks to the run folder. Every rank must call this, because it is collective."""
    environment = describe_environment(ranks)
    packages = {name: found for name in (NAME, "torchao") if (found := package_version(name))}
    if ranks.is_first:
        text = environment.model_copy(update={"packages": packages}).model_dump_json(indent=2)
        write_atomically(folder.environment, f"{text}\n")


def register_model(plan: EnginePlan, batches: "Batches") -> None:
    """Register the plan's model and data in torchtitan, instead of torchtitan's own for the model family."""
    model = titan_model(plan.recipe.model, plan.recipe.layout.layers)
    family: Any = importlib.import_module(f"torchtitan.models.{model.family}")
    arguments: Any = importlib.import_module(f"torchtitan.models.{model.family}.model.args")
    parts = {"rope_scaling_args": arguments.RoPEScalingArgs(**model.rope_scaling)} if model.rope_scaling else {}
    if model.experts:
        grouped = plan.device == "cuda"  # grouped products do not support fp32
        balances = {"_debug_force_load_balance": plan.force_load_balancing}  # gpt_oss ignores the argument for this
        parts["moe_args"] = arguments.MoEArgs(**model.experts, **balances, use_grouped_mm=grouped)
    own = family.get_train_spec()
    spec = replace(
        own,
        model_cls=with_router_biases(own.model_cls),
        model_args={plan.recipe.size: getattr(arguments, model.arguments)(**model.values, **parts)},
        build_tokenizer_fn=lambda _: object(),  # FlexAttention's masks require one, but no causal mask uses it
        build_dataloader_fn=lambda dp_world_size, dp_rank, **_: batches.of(dp_rank),  # noqa: ARG005 (torchtitan's)
    )
    importlib.import_module("torchtitan.protocols.train_spec").register_train_spec(model.family, spec)


def with_router_biases(model: type[torch.nn.Module]) -> Any:  # noqa: ANN401 (torchtitan's class)
    """Return a subclass of ``model`` whose router biases start at 0; torchtitan 0.2.2 leaves them undefined."""

    class WithBiases(model):  # type: ignore[valid-type, misc]
        def init_weights(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
            super().init_weights(*arguments, **named)
            for name, parameter in self.named_parameters():
                if name.endswith("router.gate.bias"):
                    parameter.zero_()

    return WithBiases


class Batches:
    """A torchtitan data loader that yields a rank's synthetic samples and has no state to save. A step is profiled from
    the request of its first sample to the request of the next step's first sample, or to ``close``."""

    def __init__(self, plan: EnginePlan, profiler: StepProfiler) -> None:
        self.plan, self.profiler, self.dp_rank = plan, profiler, 0
        self.samples: Generator[Batch, None, None] | None = None

    def of(self, dp_rank: int) -> "Batches":
        self.dp_rank = dp_rank
        return self

    def __iter__(self) -> Iterator[Batch]:
        self.samples = self._generate()
        return self.samples

    def close(self) -> None:
        if self.samples:
            self.samples.close()

    def _generate(self) -> Generator[Batch, None, None]:
        data = build_data(self.plan)
        for step in range(self.plan.steps):
            with self.profiler.step(step):
                yield from self._step(data, step)

    def _step(self, data: TrainingData, step: int) -> Iterator[Batch]:
        layout = self.plan.recipe.layout
        samples = rank_samples(layout, self.plan.samples_before(step), self.dp_rank)
        parts = [data.micro_batch(numbers) for numbers in samples]
        if layout.pp == 1:
            yield from (({"input": part.tokens}, part.labels) for part in parts)
        else:  # the pipeline splits them again
            yield {"input": torch.cat([part.tokens for part in parts])}, torch.cat([part.labels for part in parts])


def main() -> None:
    """Train, then exit immediately as the engine's worker does, because torch's threads can abort a completed run."""
    exit_code = 1
    try:
        train(RunFolder(Path(sys.argv[1])), sys.argv[2:])
        leave_ranks()
        exit_code = 0
    except SystemExit as error:  # from torchtitan's argument parser
        exit_code = int(error.code or 0)
    except Exception as error:  # noqa: BLE001 (top level of the process: any error ends this rank)
        if isinstance(error, LlmbError):
            sys.stderr.write(f"{error.text()}\n")
        else:
            traceback.print_exc()
        sys.stderr.write(failure_line(int(os.environ.get("RANK", "0")), host_name(), error) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
