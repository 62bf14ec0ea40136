# SPDX-License-Identifier: Apache-2.0
"""Answers the open questions about GPUs, those of ``first_gpu.yaml``, on a machine with one GPU or with eight.

Each call runs the steps that fit in ``--minutes``, in order of worth, and skips those with a result, so that a machine
that is lent for a few minutes is used up by several calls. A result is a JSON file with the command, its output, the
machine, the commit and a digest of the engine's code; commit those of a new kind of machine in ``benchmarks/data``.
Where packages are missing: ``python -m benchmarks.engine.wheels FOLDER python -m benchmarks.first_gpu``.
"""

import argparse
import ast
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, TypeAdapter

from benchmarks.engine.machine import describe_machine
from llmb.base.errors import LlmbError
from llmb.base.record import Record
from llmb.base.tools import ask_program
from llmb.jobs.locks import file_lock
from llmb.runs.folder import write_atomically

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "src" / "llmb" / "engine"
KEPT = ROOT / "benchmarks" / "data" / "first_gpu"
NO_GPU = 3
PACKAGES = ("torch", "triton", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "flash-attn", "torchao")
MOST_OUTPUT = 20_000
"""Characters of the end of an output to keep."""
GRACE_S = 10.0
"""Seconds between the interrupt of a step at its limit and its end by force."""


class Step(Record):
    """A command that answers a question."""

    name: str
    question: str
    limit_s: float
    command: str
    environ: dict[str, str] = Field(default_factory=dict)


class StepResult(Record):
    """The result of a step, with all that it depends on."""

    step: Step
    status: Literal["done", "failed", "timed out"]
    exit_code: int | None
    """None if the step was ended."""
    started_at: str
    duration_s: float
    commit: str | None
    """None outside of a repository."""
    engine_digest: str
    machine: dict[str, Any]
    packages: dict[str, str]
    document: Any = None
    """The JSON document that the command printed; None if it printed none."""
    output: str
    """The end of all other output."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpus", type=int, choices=(1, 8), help="whose steps to run (default: the GPUs that are there)"
    )
    parser.add_argument("--out", type=Path, default=Path("first_gpu"), help="folder of results (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=4.0, help="time of this call (default: %(default)s)")
    parser.add_argument("--again", default="", help="names of steps to repeat, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the steps, and run nothing")
    parser.add_argument(
        "--results", type=Path, nargs="*", help=f"print a table of results (default folder: {KEPT.name})"
    )
    options = parser.parse_args()
    if options.results is not None:
        sys.stdout.write(results_table(options.results or sorted(KEPT.glob("*")), engine_digest()))
        return
    steps = steps_of(options.gpus or (8 if visible_gpus() >= 8 else 1))
    if options.list:
        sys.stdout.write("".join(f"{each.name:26} {each.limit_s:4.0f} s  {each.question}\n" for each in steps))
        return
    if not visible_gpus():
        sys.stderr.write("nothing measured: nvidia-smi reports no GPU\n")
        sys.exit(NO_GPU)
    try:
        with file_lock(options.out / "lock", 1, "measuring with this folder"):
            results = list(run_steps(steps, options.out, 60 * options.minutes, options.again.split(",")))
    except LlmbError as error:
        sys.exit(f"{error}")
    left = [step.name for step in steps if not (options.out / f"{step.name}.json").exists()]
    sys.stderr.write(f"left for the next call: {', '.join(left) or 'nothing'}\n")
    sys.exit(0 if all(result.status == "done" for result in results) else 1)


def steps_of(gpus: int) -> list[Step]:
    listed = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return TypeAdapter(dict[int, list[Step]]).validate_python(listed)[gpus]


def visible_gpus() -> int:
    listed = ask_program(["nvidia-smi", "--list-gpus"], 20.0)
    return listed.text.count("GPU ") if listed.code == 0 else 0


def run_steps(steps: Sequence[Step], out: Path, budget_s: float, again: Sequence[str] = ()) -> Iterator[StepResult]:
    """Run the steps without a result of this code, as many as surely end within the budget; yield their results."""
    out.mkdir(parents=True, exist_ok=True)
    ends_s, digest = time.monotonic() + budget_s, engine_digest()
    for step in steps:
        path = out / f"{step.name}.json"
        if step.name not in again and path.exists() and read_result(path).engine_digest == digest:
            continue
        if time.monotonic() + step.limit_s + GRACE_S > ends_s:
            return
        sys.stderr.write(f"{step.name}: {step.question}\n")
        result = run_step(step, out, digest)
        write_atomically(path, result.model_dump_json(indent=1) + "\n")
        sys.stderr.write(f"{step.name}: {result.status} in {result.duration_s:.0f} s: {path}\n")
        yield result


def run_step(step: Step, out: Path, digest: str) -> StepResult:
    """Run a step in a process group of its own, below an install root in ``out``; end the group at the limit."""
    environ = {**os.environ, "LLMB_INSTALL": str(out / "install"), "PYTHONUNBUFFERED": "1", **step.environ}
    started, began_s = datetime.now(UTC), time.monotonic()
    machine = describe_machine()
    process = subprocess.Popen(
        [sys.executable, *shlex.split(step.command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environ,
        start_new_session=True,
    )
    try:
        printed, said = process.communicate(timeout=step.limit_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        printed, said = end_group(process)
        code = None
    document = parse_document(printed)
    return StepResult(
        step=step,
        status="timed out" if code is None else "failed" if code else "done",
        exit_code=code,
        started_at=started.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - began_s, 1),
        commit=commit(),
        engine_digest=digest,
        machine=machine,
        packages=dict(versions()),
        document=document,
        output=(said if document is not None else f"{printed}\n{said}")[-MOST_OUTPUT:],
    )


def end_group(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Interrupt a process group, so that it writes what it has, then end it; return its output."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=GRACE_S)
    return process.communicate()


def parse_document(printed: str) -> Any:  # noqa: ANN401 (whatever the command prints)
    try:
        return json.loads(printed)
    except ValueError:
        return None


def commit() -> str | None:
    """Return the commit of the repository, with ``+`` if files of it have changed; None outside of one."""
    head = ask_program(["git", "-C", str(ROOT), "rev-parse", "HEAD"], 20.0)
    changed = ask_program(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"], 20.0)
    return head.text.strip() + ("+" if changed.text.strip() else "") if head.code == 0 else None


def versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def engine_digest(folder: Path = ENGINE) -> str:
    """Return a digest of the engine's code: comments and docstrings do not count, nor do line breaks."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(body := getattr(node, "body", None), list):
                node.body = [each for each in body if not is_text(each)]  # type: ignore[attr-defined]
        digest.update(f"{file.relative_to(folder)} {ast.dump(tree)}".encode())
    return digest.hexdigest()[:12]


def is_text(node: ast.AST) -> bool:
    """Return whether a statement is only a string, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def read_result(path: Path) -> StepResult:
    return StepResult.model_validate_json(path.read_bytes())


def results_table(folders: Sequence[Path], digest: str) -> str:
    """Return the results in these folders as a Markdown table; those of other code than ``digest`` are marked."""
    rows = [row_of(folder, read_result(path), digest) for folder in folders for path in sorted(folder.glob("*.json"))]
    if not rows:
        return "No GPU has been measured by these steps.\n"
    head = "| machine | step | status | step time s | peak GiB | code |\n|---|---|---|---:|---:|---|\n"
    return head + "".join(rows)


def row_of(folder: Path, result: StepResult, digest: str) -> str:
    found: Mapping[str, Any] = result.document if isinstance(result.document, dict) else {}
    of_run = found.get("result") or {}
    time_s, peak = (of_run.get("step_time_s") or {}).get("mean"), of_run.get("peak_memory_gib")
    cells = (
        folder.name,
        result.step.name,
        result.status,
        "" if time_s is None else f"{time_s:.4g}",
        "" if peak is None else f"{peak:.2f}",
        (result.commit or "")[:8] + ("" if result.engine_digest == digest else ", changed since"),
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    main()
