# SPDX-License-Identifier: Apache-2.0
"""``llmb metrics``."""

from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.cli.json_option import Json
from llmb.cli.messages import print_unspecified
from llmb.cli.options import takes_recipe
from llmb.errors import UsageError
from llmb.metrics.contradictions import LONGEST_STEP_S, SHORTEST_STEP_S
from llmb.metrics.throughput import throughput
from llmb.report.output import print_json, print_table
from llmb.report.recipe_report import metrics_document, throughput_table

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes_recipe
def metrics(
    request: Request,
    step_time: Annotated[float, typer.Option("--step-time", help="Seconds per training step.")],
    json: Json = False,
) -> None:
    """Throughput, TFLOPS per GPU, MFU and time to train for a given step time.

    MFU is printed in every FLOP convention: 'published' as in the reference document, 'full' with the full attention
    matrix, 'causal' with only the half that is needed.

    Example:

    - `llmb metrics -w pretrain_llama3.1 -s 8b --scale 8 --gpu-type h100 --step-time 12.27`
    """
    if not SHORTEST_STEP_S < step_time < LONGEST_STEP_S:
        raise UsageError(f"step time {step_time} s is invalid", do="specify --step-time in seconds, above 0")
    recipe = resolve(Catalogue(), request)
    result = throughput(recipe, step_time)
    if json:
        print_json(metrics_document(recipe, result))
    else:
        print_unspecified(recipe.unspecified)
        print_table(throughput_table(recipe, result))
