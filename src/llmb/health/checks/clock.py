# SPDX-License-Identifier: Apache-2.0
"""Checks of the clock."""

from collections.abc import Iterator

from llmb.health.checks.disk import is_shared
from llmb.health.facts.clock import ClockFacts
from llmb.health.facts.disk import DiskFacts
from llmb.health.facts.source import Missing
from llmb.health.rules import Finding, rule


def clock_checks(facts: ClockFacts | Missing, install: DiskFacts | Missing) -> Iterator[Finding]:
    of = rule("clock_synchronized")
    if isinstance(facts, Missing):
        yield of.skipped(facts.reason)
    elif not facts.synchronized:
        yield of.found("warn", f"no ({facts.by})")
    elif facts.ahead_s is None:
        yield of.passed(f"yes ({facts.by})")
    else:
        side = "ahead" if facts.ahead_s > 0 else "behind"
        yield of.measured(abs(facts.ahead_s), f"{abs(facts.ahead_s):.6f} s {side} ({facts.by})", "skewed")
    yield _file_clock(install)


def _file_clock(install: DiskFacts | Missing) -> Finding:
    """A file server dates files by its own clock, which all nodes have in common."""
    of = rule("clock_file_server")
    if isinstance(install, Missing):
        return of.skipped(f"no file was written: {install.reason}")
    if isinstance(install.rates, Missing):
        return of.skipped(f"no file was written: {install.rates.reason}")
    if not is_shared(install.mount):
        return of.skipped("the root of installation is on a local disk")
    ahead_s = install.rates.clock_ahead_s
    side = "ahead of" if ahead_s > 0 else "behind"
    return of.measured(abs(ahead_s), f"{abs(ahead_s):.3f} s {side} the file server")
