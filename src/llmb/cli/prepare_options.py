# SPDX-License-Identifier: Apache-2.0
"""Options that the commands of ``llmb prepare`` share."""

from typing import Annotated

import typer

from llmb.cli.completion import workloads

Workload = Annotated[
    str, typer.Option("-w", "--workload", help="Fine-tuning workload; see 'llmb list'.", autocompletion=workloads)
]
Size = Annotated[
    str | None, typer.Option("-s", "--size", help="Model size, such as 70b, if the workload's name has none.")
]
