# SPDX-License-Identifier: Apache-2.0
"""The dtype in which FP8 matrices are multiplied on a device, and the reason. Pure."""

from typing import Literal

from llmb.catalogue.records import Record
from llmb.runs.device import Device

ProductDtype = Literal["fp8", "fp32", "bf16"]
"""``fp8``: the device's FP8 product. ``fp32``, ``bf16``: a product after an exact cast to that dtype."""


class Fp8Product(Record):
    """The product of a run, as saved in ``run.json``."""

    dtype: ProductDtype
    why: str


def fp8_product(device: Device, *, emulate: bool) -> Fp8Product:
    """``emulate`` selects a product that every GPU supports.

    CPUs do not multiply in FP8: with AMX, torch's FP8 product takes two thousand times as long as one in bf16. Without
    AVX-512 BF16, a product in bf16 takes up to forty times as long as one in fp32. A product in fp32 is fast on every
    CPU, and closest to a GPU's FP8 product: it accumulates in fp32 and rounds to bf16 once.
    """
    if device == "cpu":
        return Fp8Product(dtype="fp32", why="the values of FP8 as fp32: quick on every CPU")
    if emulate:
        return Fp8Product(dtype="bf16", why="the values of FP8 as bf16, as --emulate-fp8 specifies")
    return Fp8Product(dtype="fp8", why="the GPU's own product")
