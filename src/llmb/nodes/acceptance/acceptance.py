# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of an acceptance in order, and derives the verdict."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

from llmb.base.errors import UsageError
from llmb.base.shown_text import counted
from llmb.base.trust import ACCEPTANCES, STATE_FOLDER
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import CPU
from llmb.jobs.locks import file_lock
from llmb.nodes.acceptance.part_rows import (
    checks_row,
    devices_row,
    measured_row,
    more_runs_needed,
    pairs_row,
    runs_row,
    unfit_of_checks,
    verdict_rows,
)
from llmb.nodes.acceptance.parts import AcceptancePart, AcceptanceResult, PartResult, PartsFolder
from llmb.nodes.acceptance.recipe_choice import ChosenRecipe
from llmb.nodes.bench.bench_job import END, BenchEnd
from llmb.nodes.bench.pairs import LEAST_NODES
from llmb.nodes.bench.slow_gpus import compare_parts, gpus_document, outlier_rule
from llmb.runs.folder import BrokenRecord, new_numbered, read_stored, write_atomically, writing
from llmb.runs.record import now

REQUEST, RESULT = "request.json", "result.json"
PAGE, ARCHIVE = "acceptance.html", "runs.tar.gz"
COVERAGE = "coverage"
COMPARED = ("pass", "improved")
SLOW = ("regressed", "fail", "invalid")
"""An acceptance in which a training has one of these statuses is not a reference for later acceptances."""
Shape = TypeVar("Shape", bound=Record)
LEAST_REPEATS = 3
"""The minimum number of runs of a recipe, if time permits, so that later acceptances have a reference."""
CHECK_S, BENCH_S, JOB_S, READ_S = 10.0, 20.0, 60.0, 3.0
"""Expected seconds for a node's checks, a measurement, the start of a job, and a command that reads runs."""


Choose = Callable[[int], Sequence[ChosenRecipe]]
"""A function that returns the recipes for a number of GPUs, or raises UsageError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedNodes:
    """The machine or nodes to accept: this machine, or ``nodes`` of a cluster."""

    subject: str
    host: str
    gpu_type: str | None
    """The GPU type, or ``cpu``; None if the type is not in the catalogue."""
    per_node: int
    """GPUs per node, or processes on a CPU."""
    nodes: tuple[str, ...] = ()
    scheduler_words: tuple[str, ...] = ()
    """Options for commands that queue jobs, such as the partition."""
    visible: tuple[str, ...] = ()
    """Ids of this machine's GPUs for CUDA_VISIBLE_DEVICES."""

    @property
    def gpus(self) -> int:
        return self.per_node * max(1, len(self.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The user's choices for an acceptance. After ``minutes``, runs are not repeated."""

    minutes: float
    set_name: str | None = None
    checks: str | None = None
    """Areas or checks of ``llmb doctor``, separated by commas; None for all."""
    start_new: bool = False

    @property
    def only(self) -> list[str]:
        return ["--only", self.checks] if self.checks else []


class AcceptanceRequest(Record):
    """The content of ``request.json``; ``before`` is the folder name of the acceptance to compare with, if any."""

    schema_version: Literal[1] = 1
    started_at: str
    label: str
    key: str
    nodes: tuple[str, ...] = ()
    before: str | None = None


@dataclass(slots=True)
class Findings:
    """The rows of an acceptance so far, by name, and the unfit nodes. A new row replaces the row with the same name."""

    rows: dict[str, AcceptancePart] = field(default_factory=dict)
    unfit: list[str] = field(default_factory=list)

    def add(self, *rows: AcceptancePart) -> None:
        self.rows.update({row.name: row for row in rows})


def acceptance_key(place: AcceptedNodes, recipes: Sequence[ChosenRecipe], terms: Terms) -> str:
    """Return the key that acceptances share if nodes, recipes, checks and acceptance set are equal."""
    own = [place.host, place.gpu_type, place.per_node, place.nodes, place.visible, place.scheduler_words]
    own += [terms.set_name, terms.checks]
    return json.dumps([*own, [recipe.arguments() for recipe in recipes]])


def open_acceptance(
    install: Path, key: str, nodes: Sequence[str], *, start_new: bool
) -> tuple[Path, AcceptanceRequest]:
    """Return the folder and request of the latest unfinished acceptance with this key. Create a new one if there is
    none, if ``start_new`` is set or if a later one has trained and is not slow; raise NotWritable if that fails."""
    parent = install / ACCEPTANCES
    before = None
    for path in sorted(parent.glob(f"*/{REQUEST}"), reverse=True):
        request = _stored_or_none(path, AcceptanceRequest)
        if request is None or request.key != key:
            continue
        if (path.parent / RESULT).exists():
            result = _stored_or_none(path.parent / RESULT, AcceptanceResult)
            if result and result.page and not any(_is_slow(row) for row in result.parts):
                before = path.parent
                break
            continue
        if not start_new:
            return path.parent, request
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = new_numbered(parent, datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), Path.mkdir)
        request = AcceptanceRequest(
            started_at=now(),
            label=f"accept-{folder.name}",
            key=key,
            nodes=tuple(nodes),
            before=before.name if before else None,
        )
        write_atomically(folder / REQUEST, request.model_dump_json(indent=2) + "\n")
    return folder, request


def _is_slow(row: AcceptancePart) -> bool:
    return row.status in SLOW and row.training


def _stored_or_none(path: Path, shape: type[Shape]) -> Shape | None:
    try:
        return read_stored(path, shape)
    except (OSError, BrokenRecord):
        return None


def accept(
    parts: PartsFolder,
    request: AcceptanceRequest,
    place: AcceptedNodes,
    choose: Choose,
    terms: Terms,
    write_page: Callable[[AcceptanceResult, Sequence[str]], None],
) -> AcceptanceResult:
    """Run all parts that have no saved result; write the result and, if anything was trained, the archive and the page.

    Raises the errors of ``PartsFolder.do``, ``choose`` and ``write_page``, NotWritable if a file cannot be written, and
    BrokenRecord if the result of a job is damaged."""
    assert parts.folder is not None
    busy = "accepting this machine"
    waiting = "another 'llmb accept' is running here; waiting for it to end"
    with file_lock(parts.install / STATE_FOLDER / "accept.lock", inf, busy, lambda: parts.say(waiting)):
        findings, labels = do_parts(parts, request, place, choose, terms)
        page, archive = parts.folder / PAGE, parts.folder / ARCHIVE
        if labels:
            if not (parts.folder / "archive.json").exists():
                archive.unlink(missing_ok=True)  # a killed call may have written it
            parts.do("archive", "archive", *labels, "-o", str(archive), seconds=READ_S)
        result = conclude(findings, place, request, parts.seconds, *((page, archive) if labels else (None, None)))
        if labels:
            write_page(result, labels)
        with writing(parts.folder):
            write_atomically(parts.folder / RESULT, result.model_dump_json(indent=2) + "\n")
    return result


def do_parts(
    parts: PartsFolder, request: AcceptanceRequest, place: AcceptedNodes, choose: Choose, terms: Terms
) -> tuple[Findings, list[str]]:
    """Run, or only plan, all parts; return the findings, and the labels of the runs in order."""
    findings = Findings()
    before = parts.install / ACCEPTANCES / request.before if request.before else None
    fit: list[str] = []
    if place.nodes:
        fit = _check_nodes(parts, place, terms, findings)
    else:
        _check_machine(parts, place, terms, before, findings)
    labels: list[str] = []
    if place.nodes and not fit:
        return findings, labels
    try:
        recipes = choose(place.per_node * max(1, len(fit)))
    except UsageError as error:
        if not findings.unfit:
            raise
        findings.add(AcceptancePart(name="runs", status="left out", value=error.what))  # the fit nodes are too few
        return findings, labels
    trained, there = max(recipe.scale or place.gpus for recipe in recipes), place.per_node * max(1, len(fit))
    each_alone = trained == 1 and len(place.visible) == there
    if trained < there and place.gpu_type != CPU and not each_alone:
        value = f"trained on {trained} of {there} GPUs; no recipe is published for all of them, or fewer were requested"
        findings.add(AcceptancePart(name=COVERAGE, status="warn", value=value))
    for number, recipe in enumerate(recipes):
        for own in _trainings(request, place, recipe, number if len(recipes) > 1 else None, fit, before):
            own.train(parts, findings, terms)
            labels.append(own.label)
    if terms.set_name and labels:
        result = parts.do("set", "judge", *labels, "--acceptance", terms.set_name, seconds=READ_S)
        findings.add(*verdict_rows("set", result, terms.set_name))
    return findings, labels


def _check_machine(
    parts: PartsFolder, place: AcceptedNodes, terms: Terms, before: Path | None, findings: Findings
) -> None:
    findings.add(checks_row(parts.do("checks", "doctor", *terms.only, seconds=CHECK_S)))
    result = parts.do("devices", "bench", "gpus", seconds=BENCH_S)
    findings.add(devices_row(result, result.document))
    measurements = {"memory": ["bench", "memory", "--seconds", "1"]}
    if place.per_node > 1:
        size = (
            ["--ranks", str(place.per_node), "--max-size", "4MiB"] if place.gpu_type == CPU else ["--max-size", "1GiB"]
        )
        measurements["all-reduce"] = ["bench", "collectives", "all_reduce", *size]
    for name, command in measurements.items():
        kept = _stored_or_none(before / f"{name}.json", PartResult) if before else None
        findings.add(measured_row(name, parts.do(name, *command, seconds=BENCH_S), kept))


def _check_nodes(parts: PartsFolder, place: AcceptedNodes, terms: Terms, findings: Findings) -> list[str]:
    fit = list(place.nodes)

    def leave_out(names: Sequence[str]) -> None:
        findings.unfit += [name for name in fit if name in names]
        fit[:] = [name for name in fit if name not in names]

    words = ["--nodes", ",".join(fit), *terms.only, *place.scheduler_words]
    checks = parts.do("checks", "doctor", *words, seconds=JOB_S + CHECK_S)
    findings.add(checks_row(checks))
    leave_out(unfit_of_checks(checks))
    if not fit:
        return fit
    result, end = _measure_in_job(parts, place, "devices", ["bench", "gpus"], fit)
    row, slow = devices_row(result, end), _unfit_of_devices(end)
    findings.add(row)
    leave_out(slow)
    if len(fit) < LEAST_NODES:
        why = f"{counted(len(fit), 'fit node')}; {LEAST_NODES} are needed"
        findings.add(AcceptancePart(name="pairs", status="left out", value=why))
        return fit
    result, end = _measure_in_job(parts, place, "pairs", ["bench", "collectives", "--pairwise"], fit)
    findings.add(pairs_row(result, end))
    leave_out([one["node"] for one in (end or {}).get("nodes", []) if one["fit"] is False])
    return fit


def _measure_in_job(
    parts: PartsFolder, place: AcceptedNodes, name: str, command: Sequence[str], nodes: Sequence[str]
) -> tuple[PartResult, dict[str, Any] | None]:
    chosen = ["--nodes", str(len(nodes)), "--nodelist", ",".join(nodes), *place.scheduler_words]
    queued = parts.do(f"{name}-job", *command, *chosen, seconds=READ_S).document
    if queued is None:
        return parts.do(f"{name}-wait", "jobs", "wait", "JOB", seconds=JOB_S + BENCH_S), None
    waited = parts.do(f"{name}-wait", "jobs", "wait", queued["job_id"], seconds=JOB_S)
    path = Path(queued["run_dir"]) / END
    end = read_stored(path, BenchEnd) if path.exists() else None
    return waited, _document_of(end) if end else None


def _document_of(end: BenchEnd) -> dict[str, Any]:
    if end.pairwise:
        return end.pairwise.model_dump(mode="json")
    rule = outlier_rule()
    return gpus_document(compare_parts(end.measured, end.missing_nodes, rule), rule)


def _unfit_of_devices(document: Mapping[str, Any] | None) -> list[str]:
    return ((document or {}).get("exclude") or "").split(",")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRuns:
    """A recipe that is trained repeatedly under a label, on this machine or in jobs."""

    recipe: ChosenRecipe
    label: str
    name: str
    """Suffix of the names of the recipe's parts; empty if this is the only training."""
    place: AcceptedNodes
    nodes: Sequence[str]
    before: str | None
    """The label of the earlier runs to compare with, if any."""
    variables: Mapping[str, str]

    def train(self, parts: PartsFolder, findings: Findings, terms: Terms) -> None:
        """Train in rounds until more runs are not needed or would not help, time is up, or a run fails; in jobs, train
        only one round."""
        repeats, limit_s = self._first_repeats(), terms.minutes * 60
        done, spent_s = 0, 0.0
        while True:
            result = self._round(parts, repeats)
            findings.add(runs_row(f"runs{self.name}", result, repeats))
            if result.exit_code:
                return
            done, spent_s = repeats, spent_s + result.seconds
            wanted = 0 if terms.set_name else self._judge(parts, findings, repeats)
            wanted = max(wanted, LEAST_REPEATS - repeats)
            possible = int((limit_s - parts.seconds) / (spent_s / done)) if spent_s else 0
            if self.nodes or min(wanted, possible) < 1:
                return
            repeats += min(wanted, possible)

    def _first_repeats(self) -> int:
        if self.recipe.gpu_type in (None, CPU) or self.nodes:
            return LEAST_REPEATS
        return 1 if len(self.recipe.dtypes) > 1 else 2

    def _round(self, parts: PartsFolder, repeats: int) -> PartResult:
        name, words = f"runs{self.name}-{repeats}", self.recipe.arguments()
        words += ["--repeats", str(repeats), "--label", self.label]
        seconds = repeats * self.recipe.run_s
        if not self.nodes:
            return parts.do(name, "run", *words, seconds=seconds, variables=self.variables)
        scale = self.recipe.scale or self.place.per_node * len(self.nodes)
        words += [] if self.recipe.scale else ["--scale", str(scale)]
        nodes = self.nodes[: -(-scale // self.place.per_node)]
        words += [*self.place.scheduler_words, "--nodelist", ",".join(nodes)]
        queued = parts.do(f"{name}-job", "submit", *words, "--yes", seconds=READ_S).document
        ids = [job["job_id"] for job in queued["jobs"]] if queued else ["JOBS"]
        return parts.do(name, "jobs", "wait", *ids, seconds=JOB_S + seconds)

    def _judge(self, parts: PartsFolder, findings: Findings, repeats: int) -> int:
        """Add the rows of verdicts, and return the number of additional runs that would make them conclusive."""
        wanted = 0
        if self.recipe.has_figure or self.recipe.gpu_type not in (None, CPU):
            result = parts.do(f"verdict{self.name}-{repeats}", "judge", self.label, seconds=READ_S)
            findings.add(*verdict_rows(f"verdict{self.name}", result))
            wanted = more_runs_needed(result)
        if self.before:
            name, against = f"change{self.name}", ["--against", self.before]
            try:
                result = parts.do(f"{name}-{repeats}", "judge", self.label, *against, seconds=READ_S)
            except UsageError as error:  # its runs were removed
                findings.add(AcceptancePart(name=name, status="left out", value=error.what))
                return wanted
            findings.add(*verdict_rows(name, result, "before"))
            wanted = max(wanted, more_runs_needed(result))
        return wanted


def _trainings(
    request: AcceptanceRequest,
    place: AcceptedNodes,
    recipe: ChosenRecipe,
    number: int | None,
    nodes: Sequence[str],
    before: Path | None,
) -> list[RecipeRuns]:
    """Return the trainings of a recipe: one per visible GPU for a recipe on one GPU, to find slow GPUs, or else one."""
    each = place.visible if recipe.scale == 1 and len(place.visible) > 1 else (None,)
    recipe_name = "" if number is None else f"-{number + 1}"
    names = [recipe_name if gpu is None else f"{recipe_name}-gpu{index}" for index, gpu in enumerate(each)]
    return [
        RecipeRuns(
            recipe=recipe,
            label=f"{request.label}{name}",
            name=name,
            place=place,
            nodes=nodes,
            before=f"accept-{before.name}{name}" if before else None,
            variables={} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu},
        )
        for gpu, name in zip(each, names, strict=True)
    ]


def conclude(
    findings: Findings,
    place: AcceptedNodes,
    request: AcceptanceRequest,
    seconds: float,
    page: Path | None,
    archive: Path | None,
) -> AcceptanceResult:
    rows = tuple(findings.rows.values())
    verdict, sentence = answer(rows, place.subject)
    return AcceptanceResult(
        verdict=verdict,
        sentence=sentence,
        subject=place.subject,
        started_at=request.started_at,
        seconds=seconds,
        label=request.label,
        parts=rows,
        unfit=tuple(findings.unfit),
        page=str(page) if page else None,
        archive=str(archive) if archive else None,
    )


def answer(
    rows: Sequence[AcceptancePart], subject: str
) -> tuple[Literal["pass", "fail", "regressed", "inconclusive"], str]:
    """Return the overall verdict, and a sentence with the worst problems or the comparisons."""

    def texts(*names: str) -> str:
        return "; ".join(f"{row.name}: {row.value}" for row in rows if row.status in names)

    if failed := texts("fail", "invalid"):
        return "fail", f"{subject}: not fit: {failed}"
    if slower := texts("regressed"):
        return "regressed", f"{subject}: slower than it should be: {slower}"
    if unsettled := texts("inconclusive", "not comparable"):
        return "inconclusive", f"{subject}: no problem was found, but its speed is inconclusive: {unsettled}"
    if settled := "; ".join(f"{row.name}: {row.value}" for row in rows if row.status in COMPARED and row.reference):
        partly = "".join(f"; {row.value}" for row in rows if row.name == COVERAGE)
        return "pass", f"{subject}: as fast as it should be: {settled}{partly}"
    what = f"{subject}: no problem was found, but there is no figure to compare its speed with yet"
    return "inconclusive", f"{what}; the next 'llmb accept' will be compared with this one"
