# SPDX-License-Identifier: Apache-2.0
"""``llmb export``, ``llmb archive`` and ``llmb import``."""

from pathlib import Path
from typing import Annotated

import typer

from llmb.analysis.find_runs import find_all_runs
from llmb.cli.common import Json
from llmb.cli.completion import runs as complete_runs
from llmb.cli.root import install_here, say
from llmb.errors import UsageError, unknown
from llmb.exchange.export import FORMS, write_export
from llmb.exchange.imported import import_archive
from llmb.exchange.manifest import ENDING
from llmb.exchange.read_archive import needs_zstandard
from llmb.exchange.write_archive import write_archive
from llmb.report.output import print_output
from llmb.report.verdict_report import left_out_lines

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

Selection = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        autocompletion=complete_runs,
        help="Run folder, folder of runs, label, campaign, id, 'latest', date(s). Default: every run.",
    ),
]


@app.command()
def export(
    runs: Selection = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="csv, parquet, jsonl, openmetrics, tensorboard, mlflow or wandb. Repeatable; several are separated"
            " by commas. Default: csv.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where the files are written.")
    ] = Path("llmb-export"),
    json: Json = False,
) -> None:
    """Write results and steps of runs for other tools. Files of an earlier export are replaced.

    Results are those of `llmb result --json`, steps those of `metrics.jsonl`, under the same names in every form: what
    is not known is empty. The names of the files that were written are printed.

    Examples:

    - `llmb export`

    - `llmb export latest --format tensorboard -o logs`

    - `llmb export my-campaign --format csv,parquet -o results`

    - `llmb export --format openmetrics -o /var/lib/node_exporter`
    """
    chosen = _formats(formats or ["csv"])
    folders = _recorded_runs(runs)
    written = [str(path) for path in write_export(folders, chosen, output)]
    print_output({"runs": len(folders), "files": written} if json else "".join(f"{path}\n" for path in written))


def _formats(texts: list[str]) -> list[str]:
    names = [name.strip().lower() for text in texts for name in text.split(",") if name.strip()]
    for name in names:
        if name not in FORMS:
            raise unknown("format", name, FORMS)
    return names


def _recorded_runs(selectors: list[str] | None) -> list[Path]:
    """The folders of the runs that were selected, else of every one; says which are left out.

    Of a run without a record only a log is known. Raises UsageError if none has one.
    """
    found = find_all_runs(selectors, install_here(), say)
    for line in left_out_lines(found.left_out):
        say(line)
    folders = [run.path for run in found.runs if run.record]
    if logs := len(found.runs) - len(folders):
        say(f"left out: {logs} without a record; 'llmb parse --format csv' has the figures of logs")
    if not folders:
        raise UsageError(f"no run with a record{f' in {found.title}' if selectors else ''}", do="'llmb runs' shows all")
    return folders


@app.command()
def archive(
    runs: Selection = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help=f"A new file, with a name that ends in {ENDING}.")
    ] = Path(f"llmb-runs{ENDING}"),
    traces: Annotated[
        bool, typer.Option("--traces", help="Also profiles and NCCL's logs, which are large, as they are.")
    ] = False,
    json: Json = False,
) -> None:
    """Pack runs into one file that `llmb import`, `llmb judge` and `llmb compare` take on another machine.

    It has records, steps, logs and samples, with checksums. Checkpoints, batch scripts and specifications of jobs stay
    here. Lines of logs that may hold a secret are replaced.

    Examples:

    - `llmb archive my-campaign -o campaign.tar.zst`

    - `llmb archive latest --traces -o slow-run.tar.zst`
    """
    needs_zstandard()
    if not output.name.endswith(ENDING):
        raise UsageError(f"the name does not end in {ENDING}", where=str(output), do=f"name it {output.name}{ENDING}")
    if output.exists():
        raise UsageError("this file exists", where=str(output), do="name another one, or remove it")
    written = write_archive(_recorded_runs(runs), output, traces=traces)
    if written.hidden:
        say(f"{written.hidden} lines of logs may hold a secret, and are replaced in the archive")
    count, size = len(written.manifest.runs), output.stat().st_size
    document = {"archive": str(output), "runs": count, "files": len(written.manifest.files), "size_bytes": size}
    print_output({**document, "hidden_lines": written.hidden} if json else f"{output}: {count} runs, {size:,} bytes\n")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What 'llmb archive' wrote.")],
    json: Json = False,
) -> None:
    """Add the runs of an archive to those of this machine. Runs that are there already are left as they are.

    All of it is checked first: an archive with other files than those of runs, with wrong checksums or of unusual size
    is refused. `llmb jobs show` has where a run comes from.

    Example:

    - `llmb import campaign.tar.zst`
    """
    done = import_archive(file, install_here(), say)
    document = {"added": [str(path) for path in done.added], "known": [str(path) for path in done.known]}
    there = f"; {len(done.known)} were there already" if done.known else ""
    print_output(document if json else f"{len(done.added)} runs were added{there}\n")
