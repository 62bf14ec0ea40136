# SPDX-License-Identifier: Apache-2.0
"""What the command is asked for. Anything wrong is known before minutes are spent on counting."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from benchmarks.generated_code.records import MODELS, TINY_MODELS, Document

DTYPES = ("bf16", "fp8")
GPUS = ("h200", "h100")
DESCRIPTION = """Generates the code of every model's layers for a GPU, without one, and counts what it reads and writes.

Nothing is measured: a count of bytes is a lower bound of time on a GPU, and a guard against unneeded passes over
memory. Figures are compared with bounds.yaml; the exit code is 1 if one is exceeded.
"""
EPILOG = """examples:
  python -m benchmarks.generated_code --models 8b --dtypes fp8 --kernels
  python -m benchmarks.generated_code --json > before.json
  python -m benchmarks.generated_code --against before.json

A unit u is one pass over a hidden state in bf16. A case takes one to three minutes of processor time.
"""


@dataclass(frozen=True, slots=True)
class Options:
    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    gpus: tuple[str, ...]
    ranks: int
    kernels: bool
    json: bool
    before: Document | None


def read_options(arguments: Sequence[str]) -> Options:
    """Exits with 2 if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generated_code", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    lists = {"models": (*MODELS, *TINY_MODELS), "dtypes": DTYPES, "gpus": GPUS}
    whole = ",".join
    parser.add_argument("--models", action="append", help=f"of {', '.join(lists['models'])} (default: {whole(MODELS)})")
    parser.add_argument("--dtypes", action="append", help=f"default: {whole(DTYPES)}")
    parser.add_argument("--gpus", action="append", help=f"whose proxies, of h200 and h100 (default: {GPUS[0]})")
    parser.add_argument(
        "--ranks", type=int, default=1, help="GPUs that share the optimizer's work (ZeRO-1; default: 1)"
    )
    parser.add_argument("--kernels", action="store_true", help="list the kernels")
    parser.add_argument("--json", action="store_true", help="print one JSON document, with the kernels")
    parser.add_argument("--against", type=Path, metavar="FILE", help="a document of --json to compare with")
    found = parser.parse_args(arguments)
    defaults = {"models": MODELS, "dtypes": DTYPES, "gpus": GPUS[:1]}
    try:
        chosen = {name: chosen_of(name, getattr(found, name), known) or defaults[name] for name, known in lists.items()}
        if found.json and found.against:
            raise ValueError("--json and --against: only tables compare; leave out one")
        if found.ranks < 1:
            raise ValueError(f"--ranks is {found.ranks}, but there is at least one")
        before = read_document(found.against) if found.against else None
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return Options(**chosen, ranks=found.ranks, kernels=found.kernels, json=found.json, before=before)


def chosen_of(name: str, given: list[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    """Raises ValueError for what is unknown or repeated."""
    if given is None:
        return ()
    if len(given) > 1:
        raise ValueError(f"--{name} is repeated: separate what it lists with commas, --{name} {','.join(given)}")
    chosen = tuple(given[0].split(","))
    if unknown := [one for one in chosen if one not in known]:
        raise ValueError(
            f"--{name}: unknown {', '.join(each or 'empty name' for each in unknown)}; known: {', '.join(known)}"
        )
    if repeated := sorted({one for one in chosen if chosen.count(one) > 1}):
        raise ValueError(f"--{name} repeats {', '.join(repeated)}: name each once")
    return chosen


def read_document(path: Path) -> Document:
    """Raises ValueError if there is none."""
    make = "make one with --json > FILE"
    try:
        return Document.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"--against {path}: {error.strerror}; {make}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}" if where else first["msg"]
        raise ValueError(f"--against {path}: not a document of this version ({what}); {make}") from error
