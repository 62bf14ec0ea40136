# SPDX-License-Identifier: Apache-2.0
"""``llmb bulk``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.campaigns.entry import Entry
from llmb.campaigns.files import read_campaign_file
from llmb.campaigns.job_request import job_options
from llmb.campaigns.keys import campaign_keys
from llmb.campaigns.queueing import WantedJobs, from_command_line
from llmb.campaigns.selection import selection_of
from llmb.catalogue.model_name import split_model
from llmb.cli.campaign_options import JOB, SELECTION, DryRun, Resume, StartNew, Yes, run_campaign
from llmb.cli.excluded import excluded_here, with_excluded
from llmb.cli.json_option import Json
from llmb.cli.options import given_of, takes
from llmb.cli.root import context_here
from llmb.health.exclusion import OPTION
from llmb.reference_suite.variables import documented_variables

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes(SELECTION, JOB)
def bulk(
    selecting: dict[str, Any],
    values: dict[str, Any],
    file: Annotated[Path, typer.Argument(help="Text, or YAML if its name ends in .yaml or .yml.")],
    ctx: typer.Context,
    dry_run: DryRun = False,
    yes: Yes = False,
    resume: Resume = False,
    start_new: StartNew = False,
    json: Json = False,
) -> None:
    """Queue the jobs of a file on a Slurm cluster, the largest first.

    The campaign is shown and confirmed. A client that is killed loses nothing: the same command resumes, and no job
    is queued twice. Options of the command line override those of the file; options that select
    recipes restrict the file's jobs. Format of files: `llmb docs run-many-recipes`.

    Examples:

    - `llmb bulk weekly.txt --dry-run`

    - `llmb bulk sweep.yaml --yes --partition batch --repeats 3`

    - `llmb bulk sweep.yaml --dtype fp8 --max-scale 256 --resume`
    """
    context = context_here(dry_run=dry_run)
    catalogue, selection, given = context.catalogue, selection_of(selecting), given_of(ctx, values)
    values = with_excluded(values)
    given = {name: values[name] for name in given}
    keys = campaign_keys(job_options().values(), documented_variables())
    found = read_campaign_file(file, keys, lambda name: split_model(catalogue, name))
    profile = bool(given.pop("profile", False))
    wanted = WantedJobs(
        source=str(file.absolute()),
        entries=_avoiding(from_command_line(found.entries, selection, selecting["repeats"], profile=profile)),
        problems=found.problems,
        values={**values, "profile": False},
        given=given,
        within=selection,
    )
    run_campaign(context, wanted, dry_run=dry_run, yes=yes, json=json, resume=resume, start_new=start_new)


def _avoiding(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, with the nodes that their ``exclude`` stands for; each text is looked up once."""
    texts = {text for entry in entries for text in entry.options.get(OPTION, ())}
    nodes = {text: excluded_here(text) for text in sorted(texts)}
    found = []
    for entry in entries:
        lists = tuple(nodes[text] for text in entry.options.get(OPTION, ()) if nodes[text])
        others = {name: values for name, values in entry.options.items() if name != OPTION}
        found.append(replace(entry, options={**others, **({OPTION: lists} if lists else {})}))
    return found
