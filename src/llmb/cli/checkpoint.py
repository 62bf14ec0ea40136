# SPDX-License-Identifier: Apache-2.0
"""``llmb checkpoint``: shows, exports and imports checkpoints."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.model_name import model_of
from llmb.catalogue.resolve import find_model
from llmb.cli.common import CommandGroup, Json
from llmb.cli.progress import ByteProgress
from llmb.reports.install_report import checkpoint_document, checkpoint_table
from llmb.reports.output import print_output
from llmb.runs.checkpoints.checkpoint import read_checkpoint
from llmb.runs.huggingface.tensors import parse_size
from llmb.setup.prepare.conversion import (
    AdapterImport,
    ImportRequest,
    base_and_adapters,
    default_processes,
    export_adapters,
    export_checkpoint,
    import_adapters,
    import_checkpoint,
    verify_saved,
)

HELP = "Show checkpoints; export and import weights for Hugging Face.\n\nExample:\n\n- `llmb checkpoint show FOLDER`"
app = typer.Typer(cls=CommandGroup, help=HELP, add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint written by llmb: the folder that contains 'weights'.")
]
Processes = Annotated[
    int | None,
    typer.Option("--processes", min=1, help="Number of processes, about 1 GB each. Default: one per core, up to 8."),
]
MaxFileSize = Annotated[
    str, typer.Option("--max-file-size", help="Maximum size of the weights in each file, such as 500MB.")
]


@app.command()
def show(
    checkpoint: Checkpoint,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare its checksum; exit code 2 if one differs.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the model, the step and the contents of a checkpoint.

    Examples:

    - `llmb checkpoint show CHECKPOINT --json`

    - `llmb checkpoint show CHECKPOINT --verify`
    """
    found = read_checkpoint(checkpoint)
    if verify:
        verify_saved(found, _note)
    print_output(checkpoint_document(found) if json else checkpoint_table(found))


@app.command("export")
def export_(
    checkpoint: Checkpoint,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="New folder for the model or adapters.")],
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option("--dtype", help="Dtype of exported full weights.")] = "fp32",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Maximum size of a file, such as 500MB; tensors are not split.")
    ] = "5GB",
    merge: Annotated[
        bool, typer.Option("--merge", help="Export the full model, with the adapters merged into the base.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="With --merge: the base's checkpoint. Default: as used in training or import."),
    ] = None,
    no_verify_checkpoint: Annotated[
        bool, typer.Option("--no-verify-checkpoint", help="Do not verify the checksums of the checkpoint's files.")
    ] = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face model (safetensors files and config.json), or as peft adapters.

    The command needs memory for the weights of one file or, if larger, the largest tensor, and for all adapters. The
    folder gets its final name only when all files are on disk. Adapters are written in fp32.

    Examples:

    - `llmb checkpoint export CHECKPOINT exported`

    - `llmb checkpoint export CHECKPOINT exported --dtype bf16 --max-shard-size 10GB`

    - `llmb checkpoint export ADAPTERS merged --merge`
    """
    found, largest, verify = read_checkpoint(checkpoint), parse_size(max_shard_size), not no_verify_checkpoint
    lora = found.record.lora
    if (base and not merge) or (merge and lora is None):
        what = "--base requires --merge" if base and not merge else "--merge requires adapters; these are full weights"
        do = f"omit {' and '.join(['--merge'] * merge + ['--base'] * bool(base))}"
        raise UsageError(what, where=str(checkpoint), do=f"{do}, or add --merge" if lora else do)
    if lora and not merge:
        export_adapters(found, lora, directory, _note, verify=verify)
    else:
        weights, merged = base_and_adapters(found, base, _note, verify=verify) if lora else (checkpoint, None)
        with ByteProgress("exporting") as progress:
            arguments = (weights, directory, dtype, largest, progress.bytes, _note)
            export_checkpoint(*arguments, verify=verify, merged=merged)
    sys.stderr.write(f"exported to {directory.absolute()}\n")


@app.command("import")
def import_(
    hf_directory: Annotated[
        Path,
        typer.Argument(
            metavar="HF_DIRECTORY", help="Hugging Face model, NeMo 2 checkpoint or, with --base, peft adapters."
        ),
    ],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="New folder for the checkpoint.")],
    workload: Annotated[str, typer.Option("-w", "--workload", help="Workload of the model; see 'llmb list'.")],
    size: Annotated[
        str | None, typer.Option("-s", "--size", help="Model size, such as 8b, unless the workload's name includes it.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option("--base", help="Checkpoint of the base weights, when importing peft adapters.")
    ] = None,
    processes: Processes = None,
    max_file_size: MaxFileSize = "1GB",
) -> None:
    """Import a Hugging Face model as a checkpoint for `llmb run --load-checkpoint`.

    The checkpoint contains only weights, in the dtype of the source: training starts at step 0 with a new optimizer
    state. The configuration must match the catalogue's model, and the files must contain exactly its weights, in fp32,
    bf16 or fp16. Pickle files are rejected. The same command resumes a killed import.

    Examples:

    - `llmb checkpoint import Llama-3.1-8B imported -w pretrain_llama3.1 -s 8b`

    - `llmb checkpoint import Llama-3.1-405B imported -w pretrain_llama3.1 -s 405b --processes 8`

    - `llmb checkpoint import adapter adapters -w finetune_llama3 -s 70b --base Meta-Llama-3-70B`
    """
    catalogue = Catalogue()
    workload, own_size = model_of(catalogue, workload, size)
    model = find_model(catalogue, workload, own_size)
    if base:
        import_adapters(AdapterImport(hf_directory, checkpoint, base, workload, model), _note)
    else:
        request = ImportRequest(
            hf_directory, checkpoint, workload, model, processes or default_processes(), parse_size(max_file_size)
        )
        with ByteProgress("importing") as progress:
            import_checkpoint(request, progress.bytes, _note)
    sys.stderr.write(f"imported to {checkpoint.absolute()}\n")


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
