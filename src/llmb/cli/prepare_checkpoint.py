# SPDX-License-Identifier: Apache-2.0
"""``llmb prepare checkpoint``."""

from pathlib import Path
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import model_of
from llmb.cli.checkpoint import MaxFileSize, Processes
from llmb.cli.json_option import Json
from llmb.cli.messages import say
from llmb.cli.options import model_options, takes
from llmb.cli.progress import ByteProgress
from llmb.cli.root import install_here
from llmb.huggingface.shards import parse_size
from llmb.prepare.checkpoint import CheckpointRequest, prepare_checkpoint
from llmb.prepared.folders import prepared_folders
from llmb.report.output import print_json, print_table
from llmb.report.prepared_report import checkpoint_table, prepared_checkpoint_document
from llmb.weights.conversion import default_processes


@takes(model_options())
def checkpoint(
    model: tuple[str, str],
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FOLDER",
            help="Folder of a Hugging Face model, or of a NeMo 2 checkpoint. Default: the hub, or its cache.",
        ),
    ] = None,
    processes: Processes = None,
    max_file_size: MaxFileSize = "1GB",
    json: Json = False,
) -> None:
    """Prepare the weights of fine-tuning: a Hugging Face model as a sharded checkpoint, in the dtype that it has.

    A call that was interrupted or killed is resumed by the next one; when all is prepared, another call does nothing.

    Examples:

    - `llmb prepare checkpoint -w finetune_llama3 -s 70b`

    - `llmb prepare checkpoint -w finetune_llama3 -s tiny --source small/model --processes 1`
    """
    catalogue = Catalogue()
    workload, own_size = model_of(catalogue, *model)
    request = CheckpointRequest(
        workload=workload,
        size=own_size,
        source=source,
        processes=processes or default_processes(),
        largest_file_bytes=parse_size(max_file_size),
    )
    folders = prepared_folders(install_here(), workload)
    with ByteProgress("preparing") as progress:
        prepared = prepare_checkpoint(catalogue, request, folders, progress.bytes, say)
    if not prepared.made:
        say("this checkpoint was prepared before; nothing to do")
    if json:
        print_json(prepared_checkpoint_document(prepared))
    else:
        print_table(checkpoint_table(prepared.checkpoint))
