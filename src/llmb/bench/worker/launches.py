# SPDX-License-Identifier: Apache-2.0
"""The time of an operation that computes next to nothing."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from llmb.bench.jobs import LaunchCase
from llmb.bench.worker.timing import PreparedCall
from llmb.engine.device import Moment, synchronize

MANY = 500
"""Fewer than a GPU's queue holds: the host never waits for a place in it."""
HEAD_START_CYCLES = 20_000_000
"""About 10 ms in which the GPU waits, so that all launches are in its queue when the first one begins."""


def launch(case: LaunchCase, device: torch.device) -> PreparedCall:
    value = torch.zeros(1, device=device)
    ways: dict[str, Callable[[Tensor, torch.device], float]] = {
        "host": host_seconds,
        "device": device_seconds,
        "round_trip": round_trip_seconds,
    }
    if case.way == "graph":
        seconds = partial(graph_seconds, captured(value, device), device)
    else:
        seconds = partial(ways[case.way], value, device)
    return PreparedCall(seconds, seconds=seconds)


def add_many(value: Tensor) -> None:
    for _ in range(MANY):
        value.add_(1)


def host_seconds(value: Tensor, device: torch.device) -> float:
    """The host's time for one; on a CPU, which has no queue, that of the whole operation."""
    synchronize(device)
    began = time.perf_counter()
    add_many(value)
    return (time.perf_counter() - began) / MANY


def device_seconds(value: Tensor, device: torch.device) -> float:
    torch.cuda._sleep(HEAD_START_CYCLES)
    first = Moment(device)
    add_many(value)
    return _since(first, device)


def captured(value: Tensor, device: torch.device) -> torch.cuda.CUDAGraph:
    """All launches as a graph. Capturing needs one that ran before, on another stream than the default one."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        value.add_(1)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_many(value)
    return graph


def graph_seconds(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    torch.cuda._sleep(HEAD_START_CYCLES)
    first = Moment(device)
    graph.replay()
    return _since(first, device)


def round_trip_seconds(value: Tensor, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    value.add_(1)
    synchronize(device)
    return time.perf_counter() - began


def _since(first: Moment, device: torch.device) -> float:
    last = Moment(device)
    last.wait()
    return last.seconds_since(first) / MANY
