# SPDX-License-Identifier: Apache-2.0
"""Bytes that a compiled graph reads and writes outside of products."""

import torch
from torch import Tensor
from torch.nn import functional

from llmb.engine.account.graphs import Graph, Inner, counting_backend

ROWS, COLUMNS = 8, 16
VALUES = 4 * ROWS * COLUMNS
"""Bytes of [rows, columns] in fp32."""


def moved(function, *inputs: Tensor) -> list[int]:
    """Of each graph that runs."""
    graphs: list[Graph] = []

    def called(graph, results):
        graphs.append(graph)
        return results()

    def run(*_: object) -> Inner:
        raise AssertionError("no operator communicates")

    torch.compile(function, backend=counting_backend(called, run, fuses=False), fullgraph=True)(*inputs)
    return [graph.moved for graph in graphs]


def test_what_is_fused_between_two_products_reads_and_writes_once() -> None:
    inputs, weight = torch.ones(ROWS, COLUMNS), torch.ones(COLUMNS, COLUMNS)

    def between(values: Tensor, weight: Tensor) -> Tensor:
        product = values @ weight
        return (functional.silu(product) * product + values) @ weight

    # The product and the values are read, and the sum is written.
    assert moved(between, inputs, weight) == [3 * VALUES]


def test_a_product_alone_moves_nothing_else() -> None:
    assert moved(torch.mm, torch.ones(ROWS, COLUMNS), torch.ones(COLUMNS, COLUMNS)) == [0]


def test_values_are_read_again_after_a_product() -> None:
    inputs, weight = torch.ones(ROWS, COLUMNS), torch.ones(COLUMNS, COLUMNS)

    def twice(values: Tensor, weight: Tensor) -> Tensor:
        return values.relu() @ weight + values

    # relu reads and writes; the sum reads the product and the values, and writes.
    assert moved(twice, inputs, weight) == [5 * VALUES]


def test_rows_that_are_normed_are_read_once() -> None:
    def norm(values: Tensor) -> Tensor:
        return values * (values.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    (found,) = moved(norm, torch.ones(ROWS, COLUMNS))
    assert 2 * VALUES <= found <= 2 * VALUES + 4 * ROWS
