# SPDX-License-Identifier: Apache-2.0
"""One recipe at every scale that the catalogue lists."""

from dataclasses import replace

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import Request, listed_scales, resolve
from llmb.errors import UsageError, unknown


def all_scales(catalogue: Catalogue, request: Request) -> dict[str, list[Recipe]]:
    """The recipes of a request's dtype, or of all, by dtype and from the smallest scale to the largest.

    Raises UsageError for an unknown name, and if the request has a scale.
    """
    if request.scale is not None:
        raise UsageError("--all-scales shows every scale, and --scale names one", do="give one of them")
    listed = listed_scales(catalogue, request)
    if request.dtype is not None and request.dtype not in listed:
        raise unknown("dtype", request.dtype, listed)
    return {
        dtype: [
            resolve(catalogue, replace(request, dtype=dtype, scale=scale))
            for scale in sorted({*scales.full, *scales.proxies})
        ]
        for dtype, scales in listed.items()
        if request.dtype in (None, dtype)
    }
