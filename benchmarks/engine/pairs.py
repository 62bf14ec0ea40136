# SPDX-License-Identifier: Apache-2.0
"""A step of llmb beside a step of other engines on this CPU, in one process, a step of each in turn.

The speed of a CPU that others use, too, changes by a half within minutes, and processes differ by where their memory
is: only steps that follow each other are compared here. ``python -m benchmarks.engine --tiny`` starts each engine as
its users do, in a process of its own. Here llmb is a worker without its launcher and logs, and each engine trains the
same model on batches that exist beforehand. Target: no engine that keeps what llmb keeps is faster.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import torch

from benchmarks.engine.engines import huggingface, torchtitan
from benchmarks.engine.engines.job import Job
from benchmarks.engine.engines.loop import Trainee
from benchmarks.engine.engines.loop import do_step as step_of_others
from benchmarks.engine.engines.registry import obstacle
from benchmarks.support import Premade, join_alone, trainee_of
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.engine.attention_backend import attention_kernel, choose_attention
from llmb.engine.stages import prepare_stages
from llmb.launch.local import local_variables
from llmb.launch.local_spec import local_spec
from llmb.launch.site.site import this_machine
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan, make_plan

WARM_UPS = 4
OTHERS: Mapping[str, Callable[[Job], Trainee]] = {
    "huggingface": huggingface.build,
    "huggingface-fp32": huggingface.build,
    "torchtitan": torchtitan.build,
}
WIDE = {"layers": 12, "hidden_size": 768, "attention_heads": 12, "kv_heads": 4, "head_dim": 64, "vocab_size": 4096}
WIDE_FFN = {"llama3.1": 2048, "nemotron4": 3072}
WIDE_SEQ_LEN = 512


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Milliseconds per step; ``beside_llmb`` is the median over the turns of how much longer a step is than llmb's."""

    engine: str
    median_ms: float
    quartile_ms: float
    beside_llmb: float


@dataclass(frozen=True, slots=True)
class Compared:
    model: str
    tokens_per_step: int
    dtype: str
    compiled: bool
    threads: int
    torch: str
    turns: int
    engines: tuple[EngineTimes, ...]


def main() -> None:
    options = _options()
    plan = plan_of(options)
    spec = local_spec(plan, Path(), os.environ, RunFolder(Path()))
    variables = local_variables(spec, this_machine().cores, os.environ)
    if variables:  # libraries read some of them when they are loaded, which has already happened
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})
    compared = compare(plan, options.engines.split(","), options.turns)
    sys.stdout.write(json.dumps(asdict(compared), indent=2) + "\n" if options.json else text(compared))
    sys.stdout.flush()
    os._exit(0)  # as a worker does


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(WIDE_FFN), default="llama3.1", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--wide", action="store_true", help="12 layers of 768, where products dominate")
    parser.add_argument("--turns", type=int, default=150, help="timings of each engine (default: %(default)s)")
    parser.add_argument("--engines", default=",".join(OTHERS), help="those beside llmb (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to test the benchmark itself")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    if unknown := set(options.engines.split(",")) - set(OTHERS):
        parser.error(f"--engines: no engine {', '.join(sorted(unknown))}; there are {', '.join(OTHERS)}")
    if options.quick:
        options.turns = 3
    if options.turns < 2:
        parser.error("--turns: a quartile needs at least 2")
    return options


def plan_of(options: argparse.Namespace) -> EnginePlan:
    """Two micro-batches of a sequence each, which is what other engines' adapters take."""
    overrides = Overrides(mbs=1, gbs=2, seq_len=WIDE_SEQ_LEN if options.wide else None)
    workload = f"pretrain_{options.model}"
    request = Request(workload=workload, size="tiny", dtype=options.dtype, gpu_type="cpu", scale=1, overrides=overrides)
    recipe = resolve(Catalogue(), request)
    if options.wide:
        sizes = {**WIDE, "ffn_hidden_size": WIDE_FFN[options.model]}
        layout = recipe.layout.model_copy(update={"layers": sizes["layers"]})
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=sizes), "layout": layout})
    # Gradients of the tiny recipe are summed in fp32; those of the published ones are not.
    summed = "bf16" if options.wide and recipe.dtype is Dtype.BF16 else None
    choices = Choices(steps=WARM_UPS + options.turns, window="all", compiled=options.compile, grad_reduce_dtype=summed)
    return make_plan(recipe, choices, device="cpu")


def compare(plan: EnginePlan, others: list[str], turns: int) -> Compared:
    job, steps = job_of(plan, turns), {"llmb": own_steps(plan)}
    for name in others:
        if problem := obstacle(name, job.model, job.dtype, has_gpu=False):
            sys.stderr.write(f"{name}: {problem}\n")
        elif name != "huggingface-fp32" or job.dtype is not Dtype.FP32:  # where it would be huggingface again
            steps[name] = steps_of(OTHERS[name](job.model_copy(update={"engine": name})), job)
    times = take_turns(steps, turns)
    recipe, own = plan.recipe, times["llmb"]
    return Compared(
        model=f"{recipe.model.model}, {recipe.model.layers} layers of {recipe.model.hidden_size}",
        tokens_per_step=recipe.layout.gbs * recipe.layout.seq_len,
        dtype=recipe.dtype,
        compiled=plan.compiled,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        turns=turns,
        engines=tuple(
            EngineTimes(
                engine=name,
                median_ms=1e3 * statistics.median(taken),
                quartile_ms=1e3 * statistics.quantiles(taken, n=4)[0],
                beside_llmb=statistics.median(theirs / ours for ours, theirs in zip(own, taken, strict=True)),
            )
            for name, taken in times.items()
        ),
    )


def job_of(plan: EnginePlan, turns: int) -> Job:
    recipe = plan.recipe
    return Job(
        engine="",
        model=recipe.model,
        training=recipe.training,
        dtype=recipe.dtype,
        mbs=recipe.layout.mbs,
        ga=recipe.layout.ga,
        seq_len=recipe.layout.seq_len,
        warmup_steps=WARM_UPS,
        timed_steps=turns,
        seed=plan.seed,
        device="cpu",
        compiled=plan.compiled,
    )


def own_steps(plan: EnginePlan) -> Iterator[None]:
    """Trains a step whenever asked for the next."""
    ranks = join_alone(plan)
    stages = prepare_stages(plan, ranks)
    attention = choose_attention([stage.model for stage in stages], plan, ranks)
    trainee = trainee_of(stages, plan, ranks, varlen=attention.backend == "varlen")
    premade = Premade(trainee.source.step(0))
    with attention_kernel(attention.backend):  # for the other engines, too: on a CPU it is what torch would choose
        for number in range(plan.steps):
            loss, norm, _ = trainee.step(number, premade)
            assert loss is not None
            loss.item(), norm.item()
            yield


def steps_of(trainee: Trainee, job: Job) -> Iterator[None]:
    device = torch.device(job.device)
    shape = (16, job.ga, job.mbs, job.seq_len + 1)
    for batches in cycle(torch.randint(job.model.vocab_size, shape, generator=torch.Generator().manual_seed(job.seed))):
        step_of_others(trainee, batches, device).item()
        yield


def take_turns(steps: Mapping[str, Iterator[None]], turns: int) -> dict[str, list[float]]:
    """Seconds of each engine's steps. Each turn begins with another engine: none is always behind the same one."""
    for one in steps.values():
        for _ in range(WARM_UPS):
            next(one)
    gc.disable()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(turns):
        for name in order:
            began = time.perf_counter()
            next(steps[name])
            times[name].append(time.perf_counter() - began)
        order = order[1:] + order[:1]
    return times


def text(compared: Compared) -> str:
    how = "compiled" if compared.compiled else "eager"
    lines = [
        f"{compared.model}, {compared.dtype}, {how}; "
        f"{compared.tokens_per_step} tokens per step, {compared.threads} threads, torch {compared.torch}, "
        f"{compared.turns} turns",
        f"{'engine':<18}{'median ms':>10}{'quartile':>10}{'beside llmb':>13}",
    ]
    for one in compared.engines:
        lines.append(f"{one.engine:<18}{one.median_ms:>10.2f}{one.quartile_ms:>10.2f}{one.beside_llmb:>13.2f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
