# SPDX-License-Identifier: Apache-2.0
"""``llmb archive`` and ``llmb import``."""

from pathlib import Path
from typing import Annotated

import typer

from llmb.cli.common import Json
from llmb.cli.export import Selection, recorded_only, select_runs
from llmb.cli.root import install_here, say
from llmb.errors import UsageError
from llmb.exchange.imported import import_archive
from llmb.exchange.manifest import ENDING
from llmb.exchange.read_archive import needs_zstandard
from llmb.exchange.write_archive import write_archive
from llmb.report.output import print_output

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


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
    found = recorded_only(select_runs(runs))
    written = write_archive([run.path for run in found.runs], output, traces=traces)
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
    if json:
        print_output({"added": [str(path) for path in done.added], "known": [str(path) for path in done.known]})
    else:
        there = f"; {len(done.known)} were there already" if done.known else ""
        print_output(f"{len(done.added)} runs were added{there}\n")
