# SPDX-License-Identifier: Apache-2.0
"""Schedules the rounds of pairwise measurements, which the batch script runs as steps, and reads their results.

Before the last step, the script runs ``python -m llmb.nodes.bench.pair_rounds RUN_FOLDER``, which prints the indexes of
the fit nodes. Each step has a folder below ``rounds/`` with its log, exit code and result.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmb.base.errors import RunFailed
from llmb.nodes.bench.collective_bench import read_result
from llmb.nodes.bench.measurements import PROGRAM as PRODUCT
from llmb.nodes.bench.pairs import (
    ALONE_S,
    END_S,
    GROUP_PER_NODE_S,
    GROUP_S,
    JOB,
    PAIR_S,
    STEP_S,
    USUAL_S,
    NodeReading,
    PairFigures,
    PairJob,
    PairReading,
    Readings,
    collective_figures,
    decide,
    members,
    pair_rule,
    product_figures,
    rounds,
)
from llmb.nodes.bench.protocol import COLLECTIVES_PROGRAM
from llmb.nodes.bench.slow_gpus import read_parts

SCHEDULE, STEPS = "rounds.txt", "rounds"
"""Names, in the job's folder, of the file that the batch script reads and of the folder for the steps' results."""
LAST_WORDS = 160
"""The maximum number of characters to show of a program's last line."""
LAUNCHER = "llmb: "
"""The beginning of lines that the launcher prints."""
KILLED = ("124", "137")
Places = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """Concurrent steps of one program. Each step lists the indexes of its nodes, or none to run on all fit nodes."""

    name: str
    seconds: float
    program: str
    steps: tuple[Places, ...]

    def step(self, places: Places) -> str:
        return "-".join((self.name, *map(str, places)))

    def line(self) -> str:
        """Format the phase as a line for the batch script."""
        steps = (f"{self.step(places)}:{','.join(map(str, places))}" for places in self.steps)
        return f"{self.seconds:.0f} {self.program} {' '.join(steps)}"


def phases(nodes: int, per_node: int) -> list[Phase]:
    each = tuple((node,) for node in range(nodes))
    within = [Phase("within", PAIR_S, COLLECTIVES_PROGRAM, each)] if per_node > 1 else []
    meetings = [
        Phase(f"round-{number}", PAIR_S, COLLECTIVES_PROGRAM, one.pairs) for number, one in enumerate(rounds(nodes), 1)
    ]
    group = Phase("group", GROUP_S + GROUP_PER_NODE_S * nodes, COLLECTIVES_PROGRAM, ((),))
    return [Phase("alone", ALONE_S, PRODUCT, each), *within, *meetings, group]


def schedule(nodes: int, per_node: int) -> str:
    return "".join(f"{phase.line()}\n" for phase in phases(nodes, per_node))


def limit_s(nodes: int, per_node: int) -> float:
    """Return the maximum seconds from the start of the job to its result."""
    return END_S + sum(phase.seconds + STEP_S for phase in phases(nodes, per_node))


def expected_s(nodes: int, per_node: int) -> float:
    """Return the expected seconds for the job if no node hangs."""
    return USUAL_S["begin"] + USUAL_S["node"] * nodes + USUAL_S["phase"] * len(phases(nodes, per_node))


def read_rounds(folder: Path, job: PairJob, names: Sequence[str]) -> Readings:
    """Read the results that the job's steps have written so far; ``names`` are the job's nodes."""
    run = {phase.name: phase for phase in phases(job.nodes, job.per_node)}
    alone = {node: _alone(folder, job, run, node) for node in range(job.nodes)}
    return Readings(
        names, {node: one for node, one in alone.items() if one}, tuple(_pairs(folder, job, run)), _group(folder, run)
    )


def _alone(folder: Path, job: PairJob, run: dict[str, Phase], node: int) -> NodeReading | None:
    phase, steps = run["alone"], folder / STEPS
    step = steps / phase.step((node,))
    if not step.exists():
        return None
    figures, wrong = product_figures(read_parts(step), job.device)
    problem = _problem(step, phase) or wrong
    if "within" in run and not problem:
        within, problem = _collectives(steps / run["within"].step((node,)), run["within"])
        figures = figures.model_copy(update={"gb_per_s": within.gb_per_s})
    return NodeReading(node=node, figures=figures, problem=problem)


def _pairs(folder: Path, job: PairJob, run: dict[str, Phase]) -> Iterator[PairReading]:
    """Yield the results of measured pairs. The batch script omits nodes if a step on them alone ends with an error."""
    for number, one in enumerate(rounds(job.nodes), 1):
        phase = run[f"round-{number}"]
        for pair in one.pairs:
            step = folder / STEPS / phase.step(pair)
            if step.exists():
                figures, problem = _collectives(step, phase)
                first, second = pair
                yield PairReading(
                    first=first, second=second, round=number, far=one.far, figures=figures, problem=problem
                )


def _group(folder: Path, phase_of: dict[str, Phase]) -> tuple[PairFigures, str | None] | None:
    step = folder / STEPS / "group"
    return _collectives(step, phase_of["group"]) if step.exists() else None


def _collectives(step: Path, phase: Phase) -> tuple[PairFigures, str | None]:
    if problem := _problem(step, phase):
        return PairFigures(), problem
    try:
        return collective_figures(read_result(step))
    except RunFailed as error:
        return PairFigures(), error.what


def _problem(step: Path, phase: Phase) -> str | None:
    try:
        code = (step / "code").read_text().strip()
    except OSError:
        return "no result"
    if code in KILLED:
        return f"it did not end within {phase.seconds:.0f} s and was killed"
    return None if code == "0" else last_words((step / "log").read_text(errors="replace")) or f"exit code {code}"


def last_words(text: str) -> str:
    """Return the last line of a program, else of the launcher, truncated to ``LAST_WORDS``; empty if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    others = [line for line in lines if not line.startswith(LAUNCHER)]
    return next(iter((others or lines)[-1:]), "")[:LAST_WORDS]


def main() -> None:
    folder = Path(sys.argv[1])
    job = PairJob.model_validate_json((folder / JOB).read_text())
    verdicts, _ = decide(read_rounds(folder, job, [str(node) for node in range(job.nodes)]), pair_rule(job.device))
    sys.stdout.write(",".join(map(str, members(verdicts))) + "\n")


if __name__ == "__main__":
    main()
