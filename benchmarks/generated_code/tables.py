# SPDX-License-Identifier: Apache-2.0
"""The document as tables in Markdown, which the documentation has too."""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.generated_code.records import Block, Case, Document, Pass

OF_LAYERS: tuple[tuple[str, Callable[[Block], str]], ...] = (
    ("u forward", lambda block: f"{block.forward.u:.1f}"),
    ("u backward", lambda block: f"{block.backward.u:.1f}"),
    ("u", lambda block: f"{block.u:.1f}"),
    ("cached", lambda block: f"{block.total('cached_u'):.1f}"),
    ("stores", lambda block: f"{block.total('uncoalesced_stores'):g}"),
    ("loads", lambda block: f"{block.total('uncoalesced_loads'):g}"),
    ("kernels", lambda block: f"{block.total('kernels'):g}"),
    ("products", lambda block: f"{block.total('products'):g}"),
)
OF_STEP: tuple[tuple[str, Callable[[Case], str]], ...] = (
    ("copies", lambda case: f"{case.uncoalesced_copies:g}"),
    ("B/parameter", lambda case: f"{case.bytes_per_parameter:.1f}"),
    ("B/micro-batch", lambda case: f"{case.accumulation_bytes_per_parameter:.1f}"),
    ("peak GB", lambda case: f"{case.memory.peak_gb:.1f}"),
)
EXPLANATION = """\
u: passes over a hidden state in bf16 per layer, without products and attention. cached: further ones, in which kernels
read again what the GPU's L2 cache still has to have. stores, loads: uncoalesced; copies: likewise, per layer and step,
of weights outside of compiled code. B/parameter: bytes read and written once per step; B/micro-batch: by accumulating
each further one."""


def tables(document: Document, before: Document | None, *, kernels: bool) -> str:
    """With ``before``, each figure that changed is ``before > now``."""
    rows = [row for case in document.cases for row in rows_of(case, before.find(case) if before else None)]
    gpus = sorted({case.memory.gpu_type for case in document.cases})
    parts = [
        f"torch {document.torch}, triton {document.triton}, proxies of {', '.join(gpus)}; nothing is measured",
        markdown(("case", *(name for name, _ in (*OF_LAYERS, *OF_STEP))), rows),
        EXPLANATION,
    ]
    parts.extend(routed(document))
    if kernels:
        parts.extend(part for case in document.cases for part in kernel_tables(case))
    return "\n\n".join(parts) + "\n"


def rows_of(case: Case, before: Case | None) -> Iterator[list[str]]:
    """One for each kind of layers; what is of the whole step is in the first."""
    name = f"{case.model} {case.dtype}" + ("" if case.memory.gpu_type == "h200" else f" {case.memory.gpu_type}")
    for number, block in enumerate(case.blocks):
        then = before.block(block.layers) if before else None
        yield [
            f"{name}, {block.layers}" if len(case.blocks) > 1 else name,
            *(change(text(block), text(then) if then else None) for _, text in OF_LAYERS),
            *("" if number else change(text(case), text(before) if before else None) for _, text in OF_STEP),
        ]


def change(now: str, then: str | None) -> str:
    return now if then in (None, now) else f"{then} > {now}"


def routed(document: Document) -> list[str]:
    return [
        f"{case.model} {case.dtype}: {block.routed_u:.1f} u of a layer with experts are of its routed experts alone."
        for case in document.cases
        for block in case.blocks
        if block.routed_u
    ]


def kernel_tables(case: Case) -> Iterator[str]:
    for block in case.blocks:
        for direction, found in (("forward", block.forward), ("backward", block.backward)):
            yield f"{case.model} {case.dtype}, {block.layers} layers, {direction}\n\n{kernel_table(found)}"
    step = [[name, f"{size:.2f}"] for name, size in case.bytes_per_parameter_by.items()]
    yield f"{case.model} {case.dtype}, once per step\n\n{markdown(('operator', 'B/parameter'), step)}"
    held = [[name, f"{size:.1f}"] for name, size in case.memory.by_gb.items()]
    yield f"{case.model} {case.dtype}, memory at the peak\n\n{markdown(('allocated by', 'GB'), held)}"


def kernel_table(found: Pass) -> str:
    rows = [
        [f"{each.name}{' (ours)' if each.ours else ''}", f"{each.u:.2f}", f"{each.cached_u:.2f}",
         f"{each.in_flight_mb:.1f}", str(each.uncoalesced_stores), str(each.uncoalesced_loads)]
        for each in found.list
    ]  # fmt: skip
    return markdown(("kernel", "u", "cached", "MB in flight", "stores", "loads"), rows)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
