# SPDX-License-Identifier: Apache-2.0
"""How often the true cause of a slow run is ranked first: real runs of a tiny model, slowed in one way each.

A baseline runs beside every slowed run, and the slowed run is explained twice: alone, and against that baseline. What a
run by itself cannot tell, such as a smaller batch, is only explained against the baseline. Target: 9 of 10 for each
cause. Delays are several times the step, so that the load of other programs does not hide them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from llmb.jobs.read_run import read_folder, recorded_run
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.folder import RunFolder
from llmb.verdict.explain_run import Explanation, explain

SUPPORT = Path(__file__).parent.parent / "tests" / "support"
STEPS = 10
WINDOW = "3-9"
TARGET = 0.9
TINY = ("-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "2", "--seq-len", "128")


@dataclass(frozen=True, slots=True)
class Injection:
    """One way to make a run slow. slow: arguments of ``slowed_runs.Slow``; options: of ``llmb run``.

    delay_steps: the delay, in steps of the baseline, which last longer on a busy machine.
    """

    name: str
    cause: str
    slow: tuple[tuple[str, str | float], ...] = ()
    delay_steps: float = 0
    options: tuple[str, ...] = ()
    baseline: tuple[str, ...] = ()
    alone: bool = True
    """Whether the run tells by itself."""


INJECTIONS = (
    Injection("a slow rank", "slow_rank", (("what", "compute"), ("rank", 1)), 3),
    Injection("a slow loader", "data_bound", (("what", "loader"),), 4),
    Injection(
        "a slow disk in the window",
        "checkpoint",
        (("what", "disk"),),
        6,
        ("--checkpoint-interval", "2"),
        ("--checkpoint-interval", "2"),
    ),
    Injection(
        "an extra recomputation",
        "recomputation",
        options=("--recompute", "full", *(DEEP := ("--layers", "8", "--gbs", "4", "--seq-len", "512"))),
        baseline=DEEP,
    ),
    Injection(
        "a small batch",
        "layout",
        # Short sequences: what a step costs whatever its batch is then several times the batch itself.
        options=("--gbs", "2", "--mbs", "1", *(SHORT := ("--seq-len", "16"))),
        baseline=("--gbs", "32", *SHORT),
        alone=False,
    ),
    Injection("a slow link", "exposed_communication", (("what", "link"), ("bytes_per_s", 15_000_000))),
)


@dataclass(frozen=True, slots=True)
class Ranked:
    """How the causes of one slowed run were ranked, alone and against its baseline."""

    injection: str
    cause: str
    alone: tuple[str, ...] | None
    against: tuple[str, ...]
    step_time_s: float
    baseline_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--only", default="", help="a part of the injections' names")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    chosen = [item for item in INJECTIONS if options.only in item.name]
    with tempfile.TemporaryDirectory(prefix="fork-server-") as folder:
        server = support("fork_server").ForkServer(Path(folder))  # loading torch takes longer than a tiny run
        found = list(ranked(chosen, options.repeats, str(server.python), quiet=options.json))
        server.stop()
    missed = [item.name for item in chosen if not all(rate >= TARGET for rate in rates(item, found))]
    sys.stdout.write(json.dumps([asdict(item) for item in found], indent=2) + "\n" if options.json else text(found))
    sys.exit(f"below {TARGET:.0%}: {', '.join(missed)}" if missed else 0)


def ranked(chosen: Sequence[Injection], repeats: int, python: str, *, quiet: bool) -> Iterator[Ranked]:
    """Kinds alternate, so that a machine that gets slower hits them all; those alike have one baseline in each turn."""
    for number in range(repeats):
        with tempfile.TemporaryDirectory(prefix="explain-causes-") as folder:
            baselines: dict[tuple[str, ...], AnalyzedRun] = {}
            for item in chosen:
                if item.baseline not in baselines:
                    baselines[item.baseline] = run(
                        Path(folder) / f"baseline-{len(baselines)}", item.baseline, (), python
                    )
                found = measure(item, Path(folder) / item.cause, baselines[item.baseline], python)
                if not quiet:
                    sys.stderr.write(f"{number + 1}: {item.name}: alone {found.alone}, against {found.against}\n")
                yield found


def _names(explanation: Explanation) -> tuple[str, ...]:
    """Without what else the machine did, which the injected delay is measured in spite of."""
    return tuple(cause.name for cause in explanation.causes if cause.name != "other_work")


def measure(item: Injection, folder: Path, baseline: AnalyzedRun, python: str) -> Ranked:
    assert baseline.step_time_s
    delay = (("ms", 1000 * item.delay_steps * baseline.step_time_s.mean),) if item.delay_steps else ()
    slow = run(folder, item.options, (*item.slow, *delay), python)
    assert slow.step_time_s
    alone, against = explain(slow), explain(slow, baseline)
    assert alone
    assert against
    return Ranked(
        item.name,
        item.cause,
        _names(alone) if item.alone else None,
        _names(against),
        slow.step_time_s.mean,
        baseline.step_time_s.mean,
    )


def run(install: Path, options: Sequence[str], slow: Sequence[tuple[str, str | float]], python: str) -> AnalyzedRun:
    """A real run, with all that a run has."""
    runs = support("slowed_runs")
    variables: dict[str, str] = runs.slowed(*([runs.Slow(**dict(slow))] if slow else []))
    command = [python, "-m", "llmb.cli.main", "run", *TINY, "--steps", str(STEPS), "--window", WINDOW]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "LLMB_INSTALL": str(install), **variables}
    subprocess.run([*command, *options], env=environ, check=True, capture_output=True)
    (path,) = install.rglob("run.json")
    return recorded_run(read_folder(RunFolder(path.parent)))


def support(name: str) -> ModuleType:
    """A module of the tests."""
    if str(SUPPORT) not in sys.path:
        sys.path.append(str(SUPPORT))
    return import_module(name)


def rates(item: Injection, found: Sequence[Ranked]) -> list[float]:
    """How often its cause is first, alone, if the run tells by itself, and against the baseline."""
    own = [ranked for ranked in found if ranked.injection == item.name]
    orders = [[one.alone for one in own if one.alone is not None], [one.against for one in own]]
    return [sum(order[:1] == (item.cause,) for order in group) / len(group) for group in orders if group]


def text(found: Sequence[Ranked]) -> str:
    lines = [f"{'injected':28} {'runs':>4} {'alone':>6} {'against':>8} {'step s':>7} {'baseline':>9}\n"]
    for item in INJECTIONS:
        own = [ranked for ranked in found if ranked.injection == item.name]
        if own:
            *alone, against = rates(item, found)
            shown = f"{alone[0]:.0%}" if alone else "-"
            times = [sum(getattr(one, name) for one in own) / len(own) for name in ("step_time_s", "baseline_s")]
            lines.append(f"{item.name:28} {len(own):4} {shown:>6} {against:8.0%} {times[0]:7.3f} {times[1]:9.3f}\n")
    return "".join(lines)


if __name__ == "__main__":
    main()
