# SPDX-License-Identifier: Apache-2.0
"""``llmb bulk``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.campaigns.expansion import split_model
from llmb.campaigns.files import read_campaign_file
from llmb.catalogue.load import Catalogue
from llmb.cli.campaign_run import Anew, DryRun, Modes, Resume, Wanted, Yes, run_campaign
from llmb.cli.job_options import JOB, given_of, job_words
from llmb.cli.json_option import Json
from llmb.cli.options import takes
from llmb.cli.selection_options import Asked, selection_options

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes(selection_options, JOB)
def bulk(
    asked: Asked,
    values: dict[str, Any],
    file: Annotated[Path, typer.Argument(help="Text, or YAML if its name ends in .yaml or .yml.")],
    ctx: typer.Context,
    dry_run: DryRun = False,
    yes: Yes = False,
    resume: Resume = False,
    anew: Anew = False,
    json: Json = False,
) -> None:
    """Queue the jobs of a file on a Slurm cluster, the largest first.

    The campaign is shown and confirmed. A client that is killed loses nothing: the same command goes on where it was,
    and no job is queued twice. Options of the command line come before those of the file; those that select leave
    some of the file's jobs only. What a file may hold: docs/how-to/run-many-recipes.md.

    Examples:

    - `llmb bulk weekly.txt --dry-run`

    - `llmb bulk sweep.yaml --yes --partition batch --repeats 3`

    - `llmb bulk sweep.yaml --dtype fp8 --max-scale 256 --resume`
    """
    catalogue = Catalogue()
    given = given_of(ctx, values)
    found = read_campaign_file(file, job_words(catalogue.variables), lambda name: split_model(catalogue, name))
    profile = bool(given.pop("profile", False))
    entries = [
        replace(
            entry,
            repeats=asked.repeats or entry.repeats,
            add_profile=entry.add_profile or (profile and not entry.profile),
            selection=replace(
                entry.selection,
                gpu_type=asked.selection.gpu_type or entry.selection.gpu_type,
                release=asked.selection.release or entry.selection.release,
            ),
        )
        for entry in found.entries
    ]
    wanted = Wanted(
        source=str(file.absolute()),
        entries=entries,
        problems=found.problems,
        values={**values, "profile": False},
        given=given,
        within=asked.selection,
    )
    run_campaign(wanted, Modes(dry_run=dry_run, yes=yes, json=json, resume=resume, anew=anew))
