# SPDX-License-Identifier: Apache-2.0
"""The option --json, which almost every command has."""

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
