# SPDX-License-Identifier: Apache-2.0
"""``llmb prepare verify``."""

from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import model_of
from llmb.cli.json_option import Json
from llmb.cli.options import model_options, takes
from llmb.cli.progress import ByteProgress
from llmb.cli.root import install_here
from llmb.errors import EnvironmentProblem
from llmb.prepare.verify import Verification, verify_prepared
from llmb.prepared.folders import prepared_folders
from llmb.report.output import print_json, print_tables
from llmb.report.prepared_report import verification_document, verification_tables


@takes(model_options())
def verify(
    model: tuple[str, str],
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Read every file and compare its checksum, not only its size.")
    ] = False,
    json: Json = False,
) -> None:
    """Verify that the data and weights of a fine-tuning are prepared: what is there, how large, and what is missing.

    The exit code is 0 only if everything is complete, and 3 if not; the commands that prepare the rest are printed.

    Examples:

    - `llmb prepare verify -w finetune_llama3 -s 70b`

    - `llmb prepare verify -w finetune_llama3 -s 70b --checksums --json`
    """
    catalogue = Catalogue()
    workload, own_size = model_of(catalogue, *model)
    found = _verified(catalogue, workload, own_size, checksums=checksums)
    if json:
        print_json(verification_document(found))
    else:
        print_tables(verification_tables(found))
    if found.lacking:
        commands = "\n         ".join(dict.fromkeys(item.command or "" for item in found.lacking))
        what = f"{len(found.lacking)} of {len(found.items)} folders are not complete"
        raise EnvironmentProblem(what, where=str(found.folders.path), do=commands)


def _verified(catalogue: Catalogue, workload: str, size: str, *, checksums: bool) -> Verification:
    folders = prepared_folders(install_here(), workload)
    if not checksums:
        return verify_prepared(catalogue, workload, size, folders, None)
    with ByteProgress("verifying") as progress:
        return verify_prepared(catalogue, workload, size, folders, progress.bytes)
