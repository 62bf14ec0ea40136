# SPDX-License-Identifier: Apache-2.0
"""Generates the code of every model's layers for a GPU, without one, and counts what it reads and writes.

Nothing is measured: a count of bytes is a lower bound of time on a GPU, and a guard against unneeded passes over
memory. Figures are compared with bounds.yaml; the exit code is 1 if one is exceeded.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.generated_code.bounds import exceeded, read_bounds
from benchmarks.generated_code.records import DENSE_MODELS, TINY_MODELS, Case, Document
from benchmarks.generated_code.tables import tables

ROOT = Path(__file__).parents[2]
DTYPES = ("bf16", "fp8")
GPUS = ("h200", "h100")
MISSING = 3
EPILOG = """examples:
  python -m benchmarks.generated_code --models 8b --dtypes fp8 --kernels
  python -m benchmarks.generated_code --json > before.json
  python -m benchmarks.generated_code --against before.json

A unit u is one pass over a hidden state in bf16. A case takes one to three minutes of processor time.
"""


def main() -> None:
    options = read_options(sys.argv[1:])
    if importlib.util.find_spec("triton") is None:
        sys.stderr.write("no triton, which generates code for GPUs: pip install -e '.[test]', or make setup's .venv\n")
        sys.exit(MISSING)
    cases = tuple(measured(options))
    document = Document(torch=version("torch"), triton=version("triton"), cases=cases)
    problems = exceeded(document, read_bounds())
    if options.json:
        sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    else:
        before = Document.model_validate_json(options.against.read_bytes()) if options.against else None
        sys.stdout.write(tables(document, before, kernels=options.kernels))
    for problem in problems:
        sys.stderr.write(f"exceeds its bound: {problem}\n")
    sys.exit(1 if problems else 0)


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generated_code", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    every = (*DENSE_MODELS, *TINY_MODELS)
    parser.add_argument(
        "--models", default=",".join(DENSE_MODELS), help=f"of {', '.join(every)} (default: %(default)s)"
    )
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="default: %(default)s")
    parser.add_argument("--gpus", default=GPUS[0], help="whose proxies, of h200 and h100 (default: %(default)s)")
    parser.add_argument("--kernels", action="store_true", help="list the kernels")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--against", type=Path, metavar="FILE", help="a document of --json to compare with")
    options = parser.parse_args(arguments)
    for name, known in (("models", every), ("dtypes", DTYPES), ("gpus", GPUS)):
        chosen = tuple(getattr(options, name).split(","))
        unknown = [one for one in chosen if one not in known]
        if unknown:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
        setattr(options, name, chosen)
    return options


def measured(options: argparse.Namespace) -> Iterator[Case]:
    for gpu in options.gpus:
        for model in options.models:
            for dtype in options.dtypes:
                sys.stderr.write(f"{model} {dtype} on {gpu}\n")
                yield measure(model, dtype, gpu)


def measure(model: str, dtype: str, gpu_type: str) -> Case:
    """In a process of its own. Exits if that fails."""
    command = [sys.executable, "-m", "benchmarks.generated_code.measure", model, dtype, gpu_type]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        sys.exit(done.returncode)
    return Case.model_validate_json(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
