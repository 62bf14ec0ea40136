# SPDX-License-Identifier: Apache-2.0
"""Sample outputs in pages, and the picture of the README: made from code and catalogue, so that they are never old.

A block of a page that follows ``<!-- sample: NAME -->`` is replaced. The result is one of ``make demo`` on two cores.
"""

import re
from html import escape
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.report.recipe_report import scales_table
from llmb.report.run_report import run_table
from llmb.report.table import plain_lines
from llmb.runs.choices import Choices
from llmb.runs.plan import make_plan
from llmb.runs.result import Result

RESULT = Path(__file__).with_name("sample_result.json")
SCALES = (8, 16, 32, 64, 128)
LETTER_PX, LINE_PX, EDGE_PX = 8.4, 18, 16
_BLOCK = re.compile(r"(<!-- sample: ([\w-]+) -->\n```text\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)


def with_samples(page: str, catalogue: Catalogue) -> str:
    """The page with today's outputs. Raises KeyError for a sample that is not known."""
    samples = {"result": sample_result(catalogue), "figures": sample_figures(catalogue)}
    return _BLOCK.sub(lambda match: match[1] + "".join(f"{line}\n" for line in samples[match[2]]), page)


def sample_result(catalogue: Catalogue) -> list[str]:
    plan = make_plan(
        resolve(catalogue, Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=2)),
        Choices(),
        device="cpu",
    )
    return [*plain_lines(run_table(plan, Result.model_validate_json(RESULT.read_text())))]


def sample_figures(catalogue: Catalogue) -> list[str]:
    requests = (Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=scale) for scale in SCALES)
    return [*plain_lines(scales_table([resolve(catalogue, request) for request in requests]))]


def picture(catalogue: Catalogue) -> str:
    """A terminal with two commands and what they print, as SVG."""
    lines = [
        "$ llmb show pretrain_llama3.1 8b --all-scales",
        *sample_figures(catalogue),
        "",
        "$ llmb run pretrain_llama3.1 tiny",
        *sample_result(catalogue),
    ]
    width = max(map(len, lines)) * LETTER_PX + 2 * EDGE_PX
    height = len(lines) * LINE_PX + 2 * EDGE_PX
    texts = "\n".join(
        f'<text x="{EDGE_PX}" y="{EDGE_PX + LINE_PX * (number + 0.75):.1f}" fill="{_color(line)}">{_kept(line)}</text>'
        for number, line in enumerate(lines)
        if line
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" role="img" '
        'aria-label="llmb prints published figures, and the result of a run" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1b1f24"/>\n{texts}\n</svg>\n'
    )


def _kept(line: str) -> str:
    """With spaces that no browser joins, so that columns stay columns; not all know ``xml:space``."""
    return escape(line).replace(" ", "\N{NO-BREAK SPACE}")


def _color(line: str) -> str:
    return "#7ee787" if line.startswith("$") else "#e6edf3"
