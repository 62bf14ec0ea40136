# SPDX-License-Identifier: Apache-2.0
"""What FP8 matrices are multiplied in on a device, and why. Pure."""

from typing import Literal

from llmb.catalogue.records import Record
from llmb.runs.device import Device

ProductDtype = Literal["fp8", "fp32", "bf16"]
"""``fp8``: the device's own product. ``fp32``, ``bf16``: after a cast to that, which holds every FP8 value."""


class Fp8Product(Record):
    """The product of a run, as ``run.json`` has it."""

    dtype: ProductDtype
    why: str


def fp8_product(device: Device, *, emulate: bool) -> Fp8Product:
    """``emulate`` asks for a product that every GPU has.

    A CPU never multiplies in FP8: where it has AMX, torch's FP8 product takes two thousand times as long as one in
    bf16. Where it lacks AVX-512 BF16, one in bf16 takes up to forty times as long as one in fp32. That one is quick on
    every CPU, and closest to a GPU's FP8 product: sums in fp32, and one rounding to bf16.
    """
    if device == "cpu":
        return Fp8Product(dtype="fp32", why="the values of FP8 as fp32: quick on every CPU")
    if emulate:
        return Fp8Product(dtype="bf16", why="the values of FP8 as bf16, as --emulate-fp8 specifies")
    return Fp8Product(dtype="fp8", why="the GPU's own product")
