# SPDX-License-Identifier: Apache-2.0
"""An image that was imported, as text and as a JSON document."""

from typing import Any

from llmb.install.images import ImportedImage
from llmb.shown_text import printable

GB = 10**9


def image_document(found: ImportedImage, runtime: str) -> dict[str, Any]:
    """The JSON of ``llmb prepare image``; its keys are a contract."""
    return {
        "path": str(found.path),
        "runtime": runtime,
        "bytes": found.bytes,
        "sha256": found.sha256,
        "made": found.made,
    }


def image_text(found: ImportedImage, runtime: str) -> str:
    checksum = f"sha256  {found.sha256}\n" if found.sha256 else ""
    return (
        f"image   {printable(str(found.path))}\nsize    {found.bytes / GB:.3f} GB\n{checksum}"
        f"\n# in cluster_config.yaml:\ncontainer:\n  runtime: {runtime}\n  image: {printable(str(found.path))}\n"
    )
