# SPDX-License-Identifier: Apache-2.0
"""``llmb config``: shows, changes and checks settings."""

import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from llmb.base.errors import EnvironmentProblem, InvalidRun, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.data_files import CatalogueError
from llmb.catalogue.model_name import split_model
from llmb.catalogue.user_files import check_user_files
from llmb.cli.common import CommandGroup, Json
from llmb.cli.root import install_here, say
from llmb.cli.shared_options import COMPLETIONS, complete_size
from llmb.jobs.settings_in_effect import settings_in_effect
from llmb.launch.documents.launch_scripts import REPOSITORY, check_checkout, scripts_of
from llmb.launch.scheduler_lookup import cluster_schema, read_cluster_site, user_schema
from llmb.launch.site.cluster_config import is_key, read_cluster_file
from llmb.launch.site.settings_edit import migrate as migrate_file
from llmb.launch.site.settings_edit import migrated_text, set_value, unset_value
from llmb.launch.site.site import suite_checkout
from llmb.reports.install_report import (
    checked_document,
    checked_table,
    settings_document,
    settings_tables,
    user_files_table,
)
from llmb.reports.output import print_output
from llmb.runs.folder import CLUSTER_CONFIG, chosen_root, user_config

app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)

User = Annotated[bool, typer.Option("--user", help="Change your own defaults, which override the cluster's settings.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="Dotted key, such as slurm.account.")]


@app.callback()
def config() -> None:
    """Show and change the settings of this cluster and your own defaults.

    The cluster's settings are in cluster_config.yaml in the install root, your defaults in
    ~/.config/llmb/config.yaml. A setting comes from the first of these that has it: an option, a shell
    variable, your defaults, cluster_config.yaml, the catalogue, llmb's own defaults.

    Example:

    - `llmb config show`
    """


@app.command()
def show(
    workload: Annotated[
        str | None,
        typer.Option(
            "-w", "--workload", help="Also show this workload's settings.", autocompletion=COMPLETIONS["workload"]
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "-s", "--size", help="With -w: size. Default: its first, or tiny on a CPU.", autocompletion=complete_size
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", help="Show the settings of jobs in this partition.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also show llmb's own defaults.")] = False,
    json: Json = False,
) -> None:
    """Show the effective settings, each with its source: a file and line, a variable, or an entry in the catalogue.

    Secrets are never shown.

    Examples:

    - `llmb config show`

    - `llmb config show -w pretrain_llama3.1 -s 405b --partition batch --json`
    """
    root = chosen_root(os.environ, Path.cwd())
    catalogue = Catalogue()
    if workload:
        workload, own_size = split_model(catalogue, workload)
        size = size or own_size
    found = settings_in_effect(catalogue, root, os.environ, workload, size, partition)
    if json:
        print_output(settings_document(found))
        return
    for file in found.files:
        say(*file.notes, *file.left_out)
    print_output(settings_tables(found, defaults=show_all))


@app.command()
def check(
    suite: Annotated[
        Path | None,
        typer.Option("--suite", help="Checkout of the suite. Default: from the settings, else in the install root."),
    ] = None,
    release: Annotated[
        str | None, typer.Option("--release", help="Release to compare with, such as 25.04. Default: the most similar.")
    ] = None,
    json: Json = False,
) -> None:
    """Check a catalogue of your own, and compare a checkout of the reference suite with its release, file by file.

    Your catalogue is the folder $LLMB_CATALOGUE, by default ~/.config/llmb/catalogue. Every file in it is read; the
    exit code is 2 if a file is invalid.

    The comparison lists the differences in everything that llmb relies on, such as the variables of a launch script and
    the commits of its software. `--framework reference_suite` does the same check before it queues a job. The exit code
    is 6 if anything differs. Without a checkout, only the catalogue is checked; one of the two must exist.

    Examples:

    - `llmb config check`

    - `llmb config check --suite dgxc-benchmarking`

    - `llmb config check --suite dgxc-benchmarking --release 25.04 --json`
    """
    catalogue = Catalogue()
    folder = catalogue.folder
    own = check_user_files(catalogue, folder) if folder else []
    problems = [problem for one in own for problem in one.problems]
    scripts = scripts_of(release) if release else None
    checkout = suite
    if checkout is None and not problems:  # else the settings might not be read
        found_at = suite_checkout(
            read_cluster_site(catalogue, install_here(), os.environ), scripts[0].tag if scripts else None
        )
        checkout = found_at if release or folder is None or found_at.exists() else None
    found = check_checkout(checkout, scripts) if checkout else []
    if json:
        print_output(checked_document(checkout, found, folder, own))
    else:
        print_output(
            [*([user_files_table(folder, own)] if folder else []), *([checked_table(found)] if checkout else [])]
        )
    if problems:
        raise CatalogueError(problems)
    changed = [item.file for item in found if item.state != "as released"]
    if changed:
        what = f"{len(changed)} of {len(found)} files differ from {found[0].script.tag}"
        raise InvalidRun(what, where=str(checkout), do=f"check out {found[0].script.tag} of {REPOSITORY}")


@app.command("set")
def set_(
    key: Key,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="Value in YAML: text, a number, [a, b] or {a: b}.")],
    user: User = False,
) -> None:
    """Set one value in cluster_config.yaml or, with --user, in your own defaults. The rest of the file is unchanged.

    Examples:

    - `llmb config set slurm.partition batch`

    - `llmb config set --user slurm.account research`

    - `llmb config set slurm.partitions.blackwell '{gpu_type: b200}'`
    """
    schema, path = _schema(key, user=user), _path(user=user)
    written = set_value(path, schema, key, value)
    say(f"{path}: {key} is {written}")


@app.command()
def unset(key: Key, user: User = False) -> None:
    """Remove one value from cluster_config.yaml or, with --user, from your own defaults.

    Example:

    - `llmb config unset slurm.account --user`
    """
    schema, path = _schema(key, user=user), _path(user=user)
    unset_value(path, schema, key)
    say(f"{path}: {key} is no longer set")


@app.command()
def migrate(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the new file, but write nothing.")] = False,
) -> None:
    """Convert the reference suite's cluster_config.yaml to llmb's format, and keep the old file next to it.

    Secrets in the old file are reported, but not copied.

    Example:

    - `llmb config migrate --dry-run`
    """
    path = install_here() / CLUSTER_CONFIG
    file = read_cluster_file(path, cluster_schema())
    if file.form is None:
        say(f"nothing to migrate: {path} {'is already in the format of llmb' if path.exists() else 'does not exist'}")
        return
    say(*file.notes[1:], *file.left_out)
    if dry_run:
        print_output(migrated_text(file))
        return
    kept = migrate_file(file)
    say(f"wrote {path}; the old file is now {kept.name}")


def _schema(key: str, *, user: bool) -> type[BaseModel]:
    own, other = (user_schema(), cluster_schema()) if user else (cluster_schema(), user_schema())
    if not is_key(own, key) and is_key(other, key):
        whose, do = ("a setting of the cluster", "omit --user") if user else ("one of your defaults", "add --user")
        raise UsageError(f"{key} is {whose}", do=do)
    return own


def _path(*, user: bool) -> Path:
    if not user:
        return install_here() / CLUSTER_CONFIG
    path = user_config(os.environ)
    if path is None:
        raise EnvironmentProblem("the folder for your defaults is unknown", do="set HOME or XDG_CONFIG_HOME")
    return path
