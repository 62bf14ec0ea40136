# SPDX-License-Identifier: Apache-2.0
"""The options of the comparison."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.cases import GPU_MODELS, TINY_MODELS
from benchmarks.engine.engines.registry import DEFAULT_ENGINES, ENGINES
from llmb.catalogue.records import Dtype

DEFAULT_BUDGET_S = 540
TRAINED = ("bf16", "fp8")
EPILOG = """examples:
  python -m benchmarks.engine                                  everything, within 9 minutes
  python -m benchmarks.engine --out h200.json                  the same; rerun it to complete the remaining cases
  python -m benchmarks.engine --models 8b,15b --dtypes fp8     a selection
  python -m benchmarks.engine --engines llmb --steps 10 --llmb-options="--recompute selective"
  python -m benchmarks.engine --tiny --json                    tiny models, as on a machine without a GPU

Progress goes to stderr, tables (or with --json the document) to stdout.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``steps`` are timed; ``micro_batches`` is per step, None for the recipe's number."""

    models: tuple[str, ...]
    dtypes: tuple[Dtype, ...]
    engines: tuple[str, ...]
    warmup_steps: int
    steps: int
    micro_batches: int | None
    rounds: int
    seed: int
    compiled: bool
    budget_s: float
    tiny: bool
    gpu_type: str | None
    llmb_options: str
    ceilings: bool
    out: Path | None
    fresh: bool
    logs: Path | None
    json: bool


def read_options(arguments: Sequence[str], *, has_gpu: bool) -> Options:
    """Without a GPU all models are tiny. Tiny runs are not compiled by default: compiling takes longer than a run."""
    parser = _parser()
    given = parser.parse_args(arguments)
    tiny = given.tiny or not has_gpu
    models = TINY_MODELS if tiny else GPU_MODELS
    return Options(
        models=_listed(parser, "--models", given.models, models, tuple(models)[:2] if tiny else tuple(models)),
        dtypes=tuple(
            Dtype(name) for name in _listed(parser, "--dtypes", given.dtypes, Dtype, ("bf16",) if tiny else TRAINED)
        ),
        engines=_listed(parser, "--engines", given.engines, ENGINES, DEFAULT_ENGINES),
        warmup_steps=given.warmup,
        steps=given.steps,
        micro_batches=given.micro_batches or None,
        rounds=given.rounds,
        seed=given.seed,
        compiled=given.compile if given.compile is not None else not tiny,
        budget_s=given.budget_s,
        tiny=tiny,
        gpu_type=given.gpu_type if has_gpu else "cpu",
        llmb_options=given.llmb_options,
        ceilings=given.ceilings,
        out=given.out,
        fresh=given.fresh,
        logs=given.logs,
        json=given.json,
    )


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
    add("--steps", type=_at_least(1), default=4, help="timed steps per case (default: %(default)s)")
    add("--warmup", type=_at_least(1), default=2, help="warm-up steps before them (default: %(default)s)")
    add(
        "--micro-batches",
        type=_at_least(0),
        default=4,
        help="micro-batches per step, the same for all engines; 0: the recipe's number (default: %(default)s)",
    )
    add("--rounds", type=_at_least(1), default=1, help="number of repetitions of everything (default: %(default)s)")
    add("--seed", type=int, default=1234, help="seed of initial weights and data (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile in all engines (default: on a GPU)")
    add(
        "--budget-s",
        type=float,
        default=DEFAULT_BUDGET_S,
        help="seconds in all; remaining cases are listed, and run by the next call (default: %(default)s)",
    )
    add("--tiny", action="store_true", help="tiny models; the default without a GPU")
    add("--gpu-type", help="GPU type whose proxies to train (default: this GPU's)")
    add("--llmb-options", default="", help="more options for llmb run, in one string")
    add("--ceilings", action=argparse.BooleanOptionalAction, default=True, help="measure the device's own kernels")
    add("--out", type=Path, help="the JSON document; results that it already has are reused")
    add("--fresh", action="store_true", help="discard the content of --out")
    add("--logs", type=Path, help="folder for the logs of all cases")
    add("--wheels", type=Path, help="folder of wheels with llmb's requirements, for machines without network access")
    add("--json", action="store_true", help="print the document instead of tables")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return whole_number
