# SPDX-License-Identifier: Apache-2.0
"""The pages on verdicts have the values of the data files."""

from pathlib import Path

from llmb.verdict.conditions import ConditionRule, condition_rules
from llmb.verdict.expectations_file import acceptance_sets
from llmb.verdict.judgement import default_tolerance

DOCS = Path(__file__).parents[2] / "docs"
EXPLANATION = (DOCS / "explanation" / "verdict.md").read_text()
HOW_TO = (DOCS / "how-to" / "judge-a-run.md").read_text()


def row(rule: ConditionRule) -> str:
    keys = ", ".join(f"`{key}`" for key in rule.keys)
    by_kind = [] if isinstance(rule.differs, str) else [f"{effect} ({kind})" for kind, effect in rule.differs.items()]
    unknown = "" if rule.unknown == "ignored" else rule.unknown
    differs = f"{', '.join(by_kind) or rule.differs}{', important' if rule.important else ''}"
    return f"| {keys} | {differs} | {unknown} | {rule.why} |"


def test_the_table_of_conditions_is_the_data_file() -> None:
    rows = [row(rule) for rule in condition_rules() if rule.differs != "ignored"]
    assert "\n".join(rows) in EXPLANATION


def test_tolerances_are_those_of_the_data_file() -> None:
    for name, found in {
        "published": default_tolerance("published"),
        "baseline, same nodes": default_tolerance("baseline", same_nodes=True),
        "baseline": default_tolerance("baseline"),
        "expectation": default_tolerance("expectation"),
    }.items():
        assert f"| {name} | {found.pct:.7g} % | {found.source} |" in EXPLANATION


def test_the_campaign_that_is_shown_queues_the_whole_set() -> None:
    (block,) = (block for block in HOW_TO.split("```text\n")[1:] if block.startswith("pretrain_llama3.1  70b"))
    queued = set()
    for line in block.partition("```")[0].splitlines():
        workload, size, dtypes, scale, _ = line.split()
        queued |= {(workload, size, dtype, int(scale)) for dtype in dtypes.split(",")}
    recipes = acceptance_sets()["h100"].recipes
    assert queued == {(one.workload, one.size, one.dtype.value, one.scale) for one in recipes}
    for name, one in acceptance_sets().items():
        assert f"| `{name}` | " in HOW_TO
        assert str(one.recipes[0].scale) in HOW_TO or "one node" in one.title
