# SPDX-License-Identifier: Apache-2.0
"""The document as tables in Markdown, which the documentation has too."""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.generated_code.records import Case, Document, Pass

COLUMNS: tuple[tuple[str, Callable[[Case], str]], ...] = (
    ("u forward", lambda case: f"{case.block.forward.u:.1f}"),
    ("u backward", lambda case: f"{case.block.backward.u:.1f}"),
    ("u", lambda case: f"{case.block.u:.1f}"),
    ("stores", lambda case: f"{case.block.total('uncoalesced_stores'):g}"),
    ("loads", lambda case: f"{case.block.total('uncoalesced_loads'):g}"),
    ("copies", lambda case: f"{case.uncoalesced_copies:g}"),
    ("kernels", lambda case: f"{case.block.total('kernels'):g}"),
    ("products", lambda case: f"{case.block.total('products'):g}"),
    ("B/parameter", lambda case: f"{case.bytes_per_parameter:.1f}"),
    ("B/micro-batch", lambda case: f"{case.accumulation_bytes_per_parameter:.1f}"),
    ("peak GB", lambda case: f"{case.memory.peak_gb:.1f}"),
)


def tables(document: Document, before: Document | None, *, kernels: bool) -> str:
    """With ``before``, each figure that changed is ``before > now``."""
    rows = [row_of(case, before.find(case) if before else None) for case in document.cases]
    gpus = sorted({case.memory.gpu_type for case in document.cases})
    parts = [
        f"torch {document.torch}, triton {document.triton}, proxies of {', '.join(gpus)}; nothing is measured",
        markdown(("case", *(name for name, _ in COLUMNS)), rows),
        "u: passes over a hidden state in bf16 per layer, without products and attention. stores, loads: uncoalesced;\n"
        "copies: likewise, per layer and step, of weights outside of compiled code.\n"
        "B/parameter: bytes read and written once per step; B/micro-batch: by accumulating each further one.",
    ]
    if kernels:
        parts.extend(part for case in document.cases for part in kernel_tables(case))
    return "\n\n".join(parts) + "\n"


def row_of(case: Case, before: Case | None) -> list[str]:
    cells = [f"{case.model} {case.dtype}" + ("" if case.memory.gpu_type == "h200" else f" {case.memory.gpu_type}")]
    for _, text in COLUMNS:
        now, then = text(case), text(before) if before else None
        cells.append(now if then in (None, now) else f"{then} > {now}")
    return cells


def kernel_tables(case: Case) -> Iterator[str]:
    for direction, found in (("forward", case.block.forward), ("backward", case.block.backward)):
        yield f"{case.model} {case.dtype}, {direction}\n\n{kernel_table(found)}"
    step = [[name, f"{size:.2f}"] for name, size in case.bytes_per_parameter_by.items()]
    yield f"{case.model} {case.dtype}, once per step\n\n{markdown(('operator', 'B/parameter'), step)}"
    held = [[name, f"{size:.1f}"] for name, size in case.memory.by_gb.items()]
    yield f"{case.model} {case.dtype}, memory at the peak\n\n{markdown(('allocated by', 'GB'), held)}"


def kernel_table(found: Pass) -> str:
    rows = [
        [f"{each.name}{' (ours)' if each.ours else ''}", f"{each.u:.2f}", str(each.uncoalesced_stores),
         str(each.uncoalesced_loads)]
        for each in found.list
    ]  # fmt: skip
    return markdown(("kernel", "u", "stores", "loads"), rows)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
