# SPDX-License-Identifier: Apache-2.0
"""docs/reference/checks.md: every check of ``llmb doctor``, with its thresholds, their sources, and the advice."""

from collections.abc import Iterator

from llmb.health.rules import AREAS, BETWEEN, TITLES, Area, Rule, rules
from reference_pages.markdown import page, table

INTRO = """What `llmb doctor` checks ([how to](../how-to/check-nodes.md)), by area. The names of areas and checks are
for `--only` and for scripts. A check of folders has one result per file system, with the place at the end of its name,
such as `disk_write_install`. What does not exist on a node, or cannot be seen, is under `not_checked` with the reason.

Values of checks with (=) are compared where several nodes are checked together; numbers are equal within 2 %.

"Chosen" thresholds have no source but experience. The page is generated from `src/llmb/health/rules.yaml`."""
ADVICE = "Advice:"


def checks_page() -> str:
    return page("# Checks of nodes", INTRO, *(part for area in (*AREAS, BETWEEN) for part in _area(area)))


def _area(area: Area) -> Iterator[str]:
    title = TITLES[area]
    yield f"## {title[0].upper()}{title[1:]} (`{area}`)"
    found = [rule for rule in rules().values() if rule.area == area]
    columns = ["check", "what it looks at", "warns", "fails", "thresholds from"]
    yield table(columns, [[_name(rule), rule.title, _warns(rule), rule.fails_if, rule.source] for rule in found])
    yield ADVICE
    yield "\n".join(f"- `{rule.name}`: {text}" for rule in found for text in _advice(rule))


def _name(rule: Rule) -> str:
    return f"`{rule.name}`{' (=)' if rule.same else ''}"


def _warns(rule: Rule) -> str | None:
    if not rule.limits or rule.name == "disk_space":
        return rule.warns_if
    return f"{rule.warns_if}: {', '.join(f'{name} {limit:g}' for name, limit in rule.limits.items())}"


def _advice(rule: Rule) -> Iterator[str]:
    texts = [rule.advice, *rule.advice_for.values()]
    yield from (text.replace("<", "\\<").replace("*", "\\*") for text in texts if text)
