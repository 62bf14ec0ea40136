# SPDX-License-Identifier: Apache-2.0
"""The options of the comparison."""

import argparse
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.cases import GPU_MODELS, TINY_MODELS
from benchmarks.engine.engines.registry import DEFAULT_ENGINES, ENGINES
from benchmarks.engine.groups import Group, Variant, load_plan
from llmb.catalogue.records import Dtype

DEFAULT_MINUTES = 9.0
TRAINED = ("bf16", "fp8")
EPILOG = """examples:
  python -m benchmarks.engine --plan --gpu-type h200           what would run, in which order, and how long it takes
  python -m benchmarks.engine --out h200.json                  as much as 9 minutes allow; rerun it for the rest
  python -m benchmarks.engine --models 8b,15b --dtypes fp8     a selection
  python -m benchmarks.engine --groups first,first-again       likewise, by the names that --plan shows
  python -m benchmarks.engine --engines llmb --steps 20 --llmb-options="--recompute selective"
  python -m benchmarks.engine --tiny --json                    tiny models, as on a machine without a GPU

Progress goes to stderr, tables (or with --json the document) to stdout.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``steps`` are timed; ``micro_batches`` is per step, None for the plan's number."""

    groups: tuple[Group, ...]
    variants: dict[str, Variant]
    warmup_steps: int
    steps: int
    micro_batches: int | None
    seed: int
    compiled: bool
    budget_s: float
    tiny: bool
    gpu_type: str | None
    llmb_options: str
    expandable_segments: bool
    ceilings: bool
    plan: bool
    out: Path | None
    resume: Path | None
    fresh: bool
    retry_failed: bool
    logs: Path | None
    json: bool


def read_options(arguments: Sequence[str], *, has_gpu: bool) -> Options:
    """Without a GPU all models are tiny, unless only the plan is asked for.

    Tiny runs are not compiled by default: compiling takes longer than a run.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.gpu_type and not has_gpu and not given.plan:
        parser.error("--gpu-type needs a GPU, or --plan")
    big = has_gpu or (given.plan and given.gpu_type is not None)
    tiny = given.tiny or not big
    plan = load_plan()
    return Options(
        groups=_chosen(parser, given, plan.groups(tiny=tiny), tiny=tiny),
        variants=plan.variants,
        warmup_steps=given.warmup,
        steps=given.steps,
        micro_batches=given.micro_batches,
        seed=given.seed,
        compiled=given.compile if given.compile is not None else not tiny,
        budget_s=60 * given.minutes,
        tiny=tiny,
        gpu_type=given.gpu_type if big else "cpu",
        llmb_options=given.llmb_options,
        expandable_segments=given.expandable_segments,
        ceilings=given.ceilings,
        plan=given.plan,
        out=given.out,
        resume=given.resume,
        fresh=given.fresh,
        retry_failed=given.retry_failed,
        logs=given.logs,
        json=given.json,
    )


def _chosen(
    parser: argparse.ArgumentParser, given: argparse.Namespace, groups: Sequence[Group], *, tiny: bool
) -> tuple[Group, ...]:
    """The groups that are asked for, with the models, dtypes and engines that are."""
    names = tuple(group.name for group in groups)
    models = tuple(TINY_MODELS if tiny else GPU_MODELS)
    chosen = _listed(parser, "--groups", given.groups, names, names[:1] if tiny else names)
    models = _listed(parser, "--models", given.models, models, models[:2] if tiny else models)
    dtypes = _listed(parser, "--dtypes", given.dtypes, Dtype, ("bf16",) if tiny else TRAINED)
    engines = _listed(parser, "--engines", given.engines, ENGINES, DEFAULT_ENGINES)
    reduced = [
        group.model_copy(
            update={
                "models": tuple(name for name in group.models if name in models),
                "dtypes": tuple(dtype for dtype in group.dtypes if dtype in dtypes),
                "engines": tuple(name for name in group.engines if name in engines),
            }
        )
        for group in groups
        if group.name in chosen
    ]
    left = tuple(group for group in reduced if group.models and group.dtypes and group.engines)
    if not left:
        parser.error("nothing to compare: no group has these models, dtypes and engines (see --plan)")
    return left


def _listed(
    parser: argparse.ArgumentParser, option: str, given: str | None, valid: Iterable[str], default: tuple[str, ...]
) -> tuple[str, ...]:
    """A comma-separated choice; ends the program if a name is unknown."""
    names = [str(name) for name in valid]
    chosen = tuple(given.split(",")) if given else default
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"{option}: unknown {', '.join(unknown)}; valid: {', '.join(names)}")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description="Trains one-GPU proxies with llmb and with other engines, one process after another, and reports"
        " the speed of each: tokens/s, TFLOPS, MFU, memory, and the ratio to the device's own kernels.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", help=f"{','.join(GPU_MODELS)}; with --tiny {','.join(TINY_MODELS)} (default: all; two)")
    add("--dtypes", help="bf16,fp8,fp32 (default: bf16,fp8; with --tiny bf16)")
    add("--engines", help=f"of {','.join(ENGINES)} (default: {','.join(DEFAULT_ENGINES)})")
    add("--groups", help="groups of cases by the names that --plan shows (default: all; with --tiny first)")
    add("--plan", action="store_true", help="print the cases in their order with time and memory, and run nothing")
    add("--steps", type=_at_least(1), default=8, help="timed steps per case (default: %(default)s)")
    add("--warmup", type=_at_least(1), default=2, help="warm-up steps before them (default: %(default)s)")
    add("--micro-batches", type=_at_least(1), help="per step, in all cases (default: the plan's, 4 or 16)")
    add("--seed", type=int, default=1234, help="seed of initial weights and data (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile in all engines (default: on a GPU)")
    add(
        "--minutes",
        type=_minutes,
        default=DEFAULT_MINUTES,
        help="minutes in all; remaining cases are listed, and run by the next call (default: %(default)s)",
    )
    add("--tiny", action="store_true", help="tiny models; the default without a GPU")
    add("--gpu-type", help="GPU type whose proxies to train (default: this GPU's)")
    add("--llmb-options", type=_words, default="", help="more options for llmb run, in one string")
    add(
        "--expandable-segments",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have torch's allocator use expandable segments in all engines, as llmb run does by itself",
    )
    add("--ceilings", action=argparse.BooleanOptionalAction, default=True, help="measure the device's own kernels")
    add("--out", type=Path, help="the JSON document, written after each case; results that it already has are reused")
    add("--resume", type=Path, help="an earlier --out to resume from, if --out does not exist")
    add("--fresh", action="store_true", help="discard the content of --out")
    add("--retry-failed", action="store_true", help="run again what failed in an earlier call")
    add("--logs", type=Path, help="folder for the logs of all cases")
    add("--wheels", type=Path, help="folder of wheels of missing packages, for machines without network access")
    add("--check", action="store_true", help="say which packages are there and which are missing, and run nothing")
    add("--json", action="store_true", help="print the document instead of tables")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return whole_number


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _words(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return text
