# SPDX-License-Identifier: Apache-2.0
"""Runs cases in order within the budget; the document is saved after each."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine import memory
from benchmarks.engine.budget import Clock, Estimates, over_budget
from benchmarks.engine.cases import Case, Subject
from benchmarks.engine.engines.registry import LLMB, obstacle
from benchmarks.engine.kernels import with_kernels, with_shares, without_floor
from benchmarks.engine.records import CaseResult, Document, Settings
from benchmarks.engine.run_case import blank, run_case
from benchmarks.engine.store import difference, known_result, save, with_case
from benchmarks.engine.verdicts import judge
from llmb.base.errors import UsageError


@dataclass(slots=True)
class Session:
    """One call. ``document`` is what is known so far."""

    document: Document
    out: Path | None
    folder: Path
    """Where processes write their files."""
    clock: Clock
    gpu_memory: float | None
    retry_failed: bool = False
    measured: set[str] = field(default_factory=set)
    """Models whose kernels this call has measured, or tried to."""

    def run(self, cases: Sequence[Case], *, ceilings: bool) -> None:
        estimates = learned(self.document, cases)
        for number, case in enumerate(cases):
            label = f"{number + 1}/{len(cases)} {case.label}"
            result = self._settled(case, estimates)
            if result is None and ceilings:
                self._measure_kernels(case, cases, estimates)
                result = self._settled(case, estimates)
            if result is None:
                self.clock.say(f"{label}: about {estimates.case_s(case):.0f} s")
                result = self._run(case, self.folder / f"case-{number}", estimates)
            elif result.status != "not_run":
                label = f"{label}: reused"
            self._save(with_case(self.document, result))
            self.clock.say(f"{label}: {outcome(result)}")

    def _run(self, case: Case, folder: Path, estimates: Estimates) -> CaseResult:
        left_s = self.clock.left_s
        limit_s = estimates.limit_s(case, left_s)
        result = run_case(case, self.document.settings, folder, limit_s)
        if result.status == "stopped":
            # A case that had less time than it may take is run again by the next call; one that hung is not.
            status, why = ("not_run", "budget: ") if limit_s >= left_s else ("failed", "")
            return result.model_copy(update={"status": status, "reason": f"{why}{result.reason}"})
        estimates.learn(case, result)
        return result

    def _settled(self, case: Case, estimates: Estimates) -> CaseResult | None:
        """The result of a case that is not to be run: a reused one, or one with the reason."""
        wanted = blank(case)
        known = known_result(self.document, wanted, settled=("done", "failed"))
        if known and difference(known, wanted) is not None:
            known = None
        if known and (known.status == "done" or not self.retry_failed):
            return known.model_copy(update={"outdated": None})
        reason = why_not(case, self.document.settings, self.gpu_memory)
        reason = reason or over_budget(estimates.case_s(case), self.clock.left_s)
        if reason and known:
            return known  # How it failed says more than that it was not run again.
        return wanted.model_copy(update={"reason": reason}) if reason else None

    def _measure_kernels(self, case: Case, cases: Sequence[Case], estimates: Estimates) -> None:
        """Those of the case's model in all dtypes of the plan, before its first case: at the same temperature."""
        name = case.subject.name
        subjects = without_floor(self.document, [other.subject for other in cases if other.subject.name == name])
        if not subjects or name in self.measured:
            return
        self.measured.add(name)
        needed_s = estimates.ceilings_s(subjects)
        if over_budget(needed_s + estimates.case_s(case), self.clock.left_s):
            self.clock.say(f"kernels of {name}: not measured, no time beside the case")
            return
        self.clock.say(f"kernels of {labels(subjects)}: about {needed_s:.0f} s")
        began = time.monotonic()
        self._save(with_kernels(self.document, subjects, self.folder / f"kernels-{name}", self.clock.left_s))
        if not without_floor(self.document, subjects):
            estimates.learn_kernels(subjects, time.monotonic() - began)

    def _save(self, document: Document) -> None:
        """With shares and verdicts: the document is complete after each case. A full disk does not end the session."""
        cases = tuple(with_shares(case, document.ceilings) for case in document.cases)
        verdicts = tuple(judge(cases, document.published))
        self.document = document.model_copy(update={"cases": cases, "verdicts": verdicts})
        try:
            save(self.document, self.out)
        except UsageError as error:
            self.clock.say(f"not saved: {error}")


def why_not(case: Case, settings: Settings, gpu_memory: float | None) -> str | None:
    """Why a case cannot be run on this machine. Options of llmb may lower its need of memory."""
    recipe = case.subject.recipe
    if reason := obstacle(case.engine, recipe.model, recipe.dtype, has_gpu=settings.gpu_type != "cpu"):
        return reason
    unknown = case.engine == LLMB and settings.llmb_options
    return None if unknown else memory.obstacle(case, gpu_memory)


def learned(document: Document, cases: Iterable[Case]) -> Estimates:
    """From the results that the document has."""
    estimates = Estimates(document.settings)
    for case in cases:
        if known := known_result(document, blank(case)):
            estimates.learn(case, known)
    return estimates


def labels(subjects: Iterable[Subject]) -> str:
    return ", ".join(subject.label for subject in subjects)


def outcome(result: CaseResult) -> str:
    if result.status != "done":
        return f"{result.status.replace('_', ' ')}: {result.reason}"
    mfu = (result.mfu_pct or {}).get("full")
    assert result.step_time_s is not None
    rate = f"{result.step_time_s['median']:.4g} s per step, {result.tokens_per_s:,.0f} tokens/s"
    return rate if mfu is None else f"{rate}, MFU {mfu:.1f} % (full)"
