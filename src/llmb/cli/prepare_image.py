# SPDX-License-Identifier: Apache-2.0
"""``llmb prepare image``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.cli.options import Json
from llmb.cli.root import install_here, say
from llmb.errors import UsageError
from llmb.install.image_sources import SUFFIXES
from llmb.install.image_tools import has_tool
from llmb.install.images import PROGRAMS, ImageRequest, import_image
from llmb.install.steps import IMAGES
from llmb.report.install_report import image_document, image_text
from llmb.report.output import print_json, print_text
from llmb.schedulers.lookup import read_cluster_site
from llmb.site.site import Site


def image(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="NAME:TAG in a registry, dockerd://NAME:TAG, or a file.")
    ],
    runtime: Annotated[
        str | None,
        typer.Option(
            "--runtime", metavar="pyxis|apptainer", help="Default: of cluster_config.yaml, else by the program here."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Folder that all nodes share. Default: of cluster_config.yaml, else images."),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option("--architecture", metavar="x86_64|aarch64", help="Of the nodes. Default: of cluster_config.yaml."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Import it again, and replace what there is.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read a file that was imported before, and compare its checksum.")
    ] = False,
    json: Json = False,
) -> None:
    """Import a container image into a file that all nodes can start: squashfs for Pyxis, SIF for Apptainer.

    The file gets its name, such as nvidia+nemo+26.04.01.sqsh, when it is complete, and its SHA-256 beside it. A file
    of this name is kept.

    It needs enroot or apptainer, and its credentials for private registries: never a password in SOURCE.

    Examples:

    - `llmb prepare image nvcr.io/nvidia/nemo:26.04.01`

    - `llmb prepare image dockerd://llmb:0.1 --runtime pyxis --folder /shared/images`

    - `llmb prepare image llmb.tar --runtime apptainer`
    """
    root = install_here()
    site = read_cluster_site(Catalogue(), root, os.environ)
    request = ImageRequest(
        source=source,
        folder=(folder or _folder(site, root)).absolute(),
        runtime=runtime or _runtime(site, source),
        architecture=architecture or site.config.install.node_architecture,
        force=force,
        verify=verify,
    )
    found = import_image(request, say)
    if not found.made:
        say("this image was imported before; nothing to do (--force imports it again)")
    if json:
        print_json(image_document(found, request.runtime))
    else:
        print_text(image_text(found, request.runtime))


def _folder(site: Site, root: Path) -> Path:
    named = site.config.install.image_folder
    return Path(named) if named else root / IMAGES


def _runtime(site: Site, source: str) -> str:
    """Raises UsageError if it is not clear."""
    if site.config.container.runtime != "none":
        return site.config.container.runtime
    by_name = [name for name, suffix in SUFFIXES.items() if source.endswith(suffix)]
    here = by_name or [name for name, program in PROGRAMS.items() if has_tool(program)]
    if len(here) == 1:
        return here[0]
    raise UsageError("what starts containers is not specified", choices=PROGRAMS, do="give it with --runtime")
