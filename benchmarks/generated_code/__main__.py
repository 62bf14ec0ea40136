# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.generated_code``; see ``options``."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.generated_code.bounds import exceeded, read_bounds
from benchmarks.generated_code.options import Options, read_options
from benchmarks.generated_code.records import Case, Document
from benchmarks.generated_code.tables import tables

ROOT = Path(__file__).parents[2]
EXCEEDED, USAGE, MISSING, FAILED = 1, 2, 3, 4
"""Exit codes."""


def main() -> None:
    options = read_options(sys.argv[1:])
    write("")  # before minutes are spent
    if importlib.util.find_spec("triton") is None:
        sys.stderr.write("no triton, which generates code for GPUs: pip install -e '.[test]', or make test\n")
        sys.exit(MISSING)
    cases = tuple(measured(options))
    document = Document(torch=version("torch"), triton=version("triton"), cases=cases)
    problems = exceeded(document, read_bounds())
    shown = tables(document, options.before, kernels=options.kernels)
    write(document.model_dump_json(indent=2) + "\n" if options.json else shown)
    for problem in problems:
        sys.stderr.write(f"exceeds its bound: {problem}\n")
    sys.exit(EXCEEDED if problems else 0)


def write(text: str) -> None:
    """To standard output. Exits if that fails, unless its reader has exited."""
    try:
        if sys.stdout is None:
            raise OSError(0, "it is closed")
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is left over at exit
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"cannot write to standard output: {error.strerror}; redirect it to a file with space\n")
            sys.exit(USAGE)


def measured(options: Options) -> Iterator[Case]:
    for gpu in options.gpus:
        for model in options.models:
            for dtype in options.dtypes:
                sys.stderr.write(f"{model} {dtype} on {gpu}\n")
                yield measure(model, dtype, gpu, options.ranks)


def measure(model: str, dtype: str, gpu_type: str, ranks: int) -> Case:
    """In a process of its own. Exits if that fails."""
    command = [sys.executable, "-m", "benchmarks.generated_code.measure", model, dtype, gpu_type, str(ranks)]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"{done.stderr}{model} {dtype} on {gpu_type} failed (exit code {done.returncode})\n")
        sys.exit(FAILED)
    return Case.model_validate_json(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
