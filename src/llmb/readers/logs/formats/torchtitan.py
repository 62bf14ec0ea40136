# SPDX-License-Identifier: Apache-2.0
"""torchtitan (0.1 to main of 2026, ``torchtitan/components/metrics.py`` and ``train.py``).

``[rank0]:[titan] 2025-06-01 10:00:00,123 - root - INFO - step: 10 loss: 7.8201 grad_norm: 2.0213 memory:
41.20GiB(51.78%) tps: 5,762 tflops: 333.65 mfu: 33.74%`` (FP8: ``N/A``), counted from 1. Step 1 and every
``log_freq``-th step (10 by default) are logged; rates are means since the previous line. A line has no step time: it
is a GPU's tokens in a step, from the header (``Trainer is initialized with ..``, ``Building device mesh ..``), divided
by ``tps``, its tokens per second; without the header, the time since the previous line per step, by the timestamps.
The two must agree. With fault tolerance a step has the tokens of all replica groups, and the mesh is that of one group.
"""

import math
import re
import sys
from collections.abc import Iterator

from llmb.readers.logs.formats.format import (
    LEAST_PRINTED_S,
    LINE_ENDS_SOON,
    NUMBER,
    Format,
    moment_before,
    number_or_none,
    rank_before,
)
from llmb.readers.logs.step_line import StepLine

_GROUPED = rb"\d[\d,]{0,19}(?:\.\d{1,9})?"
STEP = re.compile(
    rb"(?<!validate )step: {1,9}(?P<step>\d{1,9})  loss: {1,9}(?P<loss>%s)(?:  grad_norm: {1,9}(?P<norm>%s))?"
    rb"  memory: [^\r\n]{0,40}?  (?:tps|wps): (?P<rate>%s)(?:  tflops: (?P<tflops>%s))?  mfu: (?:[\d.]{1,12}%%|N/A)"
    % (NUMBER, NUMBER, _GROUPED, _GROUPED)
    + LINE_ENDS_SOON
)
_TIME = re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3,6})[^\r\n]{0,60}$")
_HEADER = re.compile(
    rb"(?:(?:(?:local batch size:? {1,2}(?P<mbs>[1-9]\d{0,8}), )?global batch size:? {1,2}(?P<gbs>\d{1,9}),"
    rb"|(?:(?P<own>[1-9]\d{0,11}) tokens per DP rank, )?(?P<tokens>\d{1,12}) tokens per train step,)"
    rb"(?: gradient accumulation steps (?P<passes>[1-9]\d{0,6}),)?[^\r\n]{0,80}?"
    rb"(?:sequence|maximum context) length:? {1,2}(?P<length>\d{1,9}), total steps:? {1,2}(?P<steps>\d{1,9})"
    rb"|Building device mesh with parallelism: (?P<sizes>[\w=, ]{1,200})"
    rb"|Building \d-D device mesh with \[(?P<names>[^\]\r\n]{0,200})\], \[(?P<mesh>[\d, ]{1,60})\]"
    rb"|Training starts at step (?P<start>\d{1,9}))" + LINE_ENDS_SOON
)
_SIZE = re.compile(rb"\b(pp|dp_replicate|dp_shard|cp|tp|ep)=([1-9]\d{0,6})\b")
MESH = b" device mesh with "
_REPLICAS = "dp"
"""Prefix of the mesh dimensions that divide the sequences of a step."""
_VALIDATION = re.compile(rb"validate step: ")
"""The time of a validation is between two timestamps, but not included in ``tps``."""
_BEGUN = re.compile(rb"(?<!validate )step: {1,9}\d{1,9}  loss: ")


class TorchtitanReader:
    def __init__(self) -> None:
        self.steps: int | None = None
        self.tokens: int | None = None
        """Tokens of one step."""
        self.own: int | None = None
        """Tokens of one data-parallel rank in one step."""
        self.sizes: dict[str, int] = {}
        """Batch sizes and sequence length, if the header has both batch sizes."""
        self.parallelism: dict[str, int] = {}
        """Sizes of the parallelism by name, with the expert-parallel size, which does not divide the tokens."""
        self.mesh: list[tuple[str, int]] = []
        self.validated = False
        """True if there was a validation since the previous line."""
        self.previous: tuple[int, float | None] = (0, None)
        """Step and timestamp (Unix time) of the previous step line."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        place = start
        for match in STEP.finditer(text, start, end):
            self.find_header(text, place, match.start())
            self.validated = self.validated or _VALIDATION.search(text, place, match.start()) is not None
            place = match.end()
            if step := self._read(match, text, start):
                yield step
        self.find_header(text, place, end)
        self.validated = self.validated or _VALIDATION.search(text, place, end) is not None

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        steps = list(self.find(text))
        return steps, not steps and _BEGUN.search(text) is not None

    def find_header(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> None:
        for match in _HEADER.finditer(text, start, end):
            if match["steps"]:
                self.steps = int(match["steps"])
                self.tokens = int(match["tokens"] or 0) or int(match["gbs"]) * int(match["length"])
                length = int(match["length"])
                batch = int(match["own"] or 0) or int(match["mbs"] or 0) * length
                batches = {"mbs": divmod(batch, length), "gbs": divmod(self.tokens, length)} if batch and length else {}
                self.sizes = {name: size for name, (size, rest) in batches.items() if not rest}
                self.sizes |= {"seq_len": length} if batches else {}
                self.own = batch * int(match["passes"]) if batch and match["passes"] else None
            elif match["start"]:
                self.previous = int(match["start"]) - 1, None
            elif match["sizes"]:
                self.parallelism = {name.decode(): int(size) for name, size in _SIZE.findall(match["sizes"])}
                self.mesh = [(name, size) for name, size in self.parallelism.items() if name != "ep"]
            else:
                names, sizes = (re.findall(rb"\w{1,40}", match[part]) for part in ("names", "mesh"))
                pairs = zip(names, map(int, sizes), strict=False)
                self.mesh = [(name.decode(), size) for name, size in pairs if size]

    @property
    def replica_groups(self) -> int:
        """Number of replica groups, each with a mesh of its own, that share a step's tokens; 1 if it is unknown."""
        if not self.tokens or not self.own or not self.mesh:
            return 1
        group = self.own * math.prod(size for name, size in self.mesh if name.startswith(_REPLICAS))
        return max(1, self.tokens // group)

    @property
    def tokens_per_gpu(self) -> float | None:
        """Tokens per GPU and step, as counted by ``tps``; None if the header lacks the tokens or the mesh."""
        gpus = math.prod(size for _, size in self.mesh) * self.replica_groups
        return self.tokens / gpus if self.tokens and self.mesh else None

    def _read(self, match: "re.Match[bytes]", text: bytes, start: int) -> StepLine | None:
        step, now = int(match["step"]), moment_before(_TIME, text, match.start(), start)
        before, then = self.previous
        steps = step - before if step > before else 1
        if step > before:  # else another rank is behind
            self.previous = step, now
        validated, self.validated = self.validated, False
        if (tokens := self.tokens_per_gpu) and (rate := number_or_none(match["rate"])):
            seconds = tokens / rate
        elif now and then and now - then >= LEAST_PRINTED_S:
            seconds = (now - then) / steps
        else:
            return None
        return StepLine(
            step=step,
            last=max(step, self.steps or 0),
            step_time_s=seconds,
            loss=number_or_none(match["loss"]),
            tflops_per_gpu=number_or_none(match["tflops"]),
            grad_norm=number_or_none(match["norm"]),
            mean_of=steps,
            rank=rank_before(text, match.start(), start),
            logged_s=None if validated else now,
        )


def layout_of(head: bytes) -> dict[str, int]:
    """Return the sizes of the layout in a log's header, under llmb's names for them."""
    reader = TorchtitanReader()
    reader.find_header(head)
    values, sizes = dict(reader.sizes), reader.parallelism
    if sizes:
        values |= {name: sizes[name] for name in ("pp", "cp", "tp", "ep") if name in sizes}
        values["gpus"] = math.prod(size for name, size in sizes.items() if name != "ep") * reader.replica_groups
    return values


FORMAT = Format(
    name="torchtitan",
    title="torchtitan",
    marks=(*(b"  memory: ", b"global batch size", b" tokens per train step, ", MESH), b"Training starts at step "),
    step=STEP,
    reader=TorchtitanReader,
    first_number=1,
    mean_of_interval=True,
    resumed=re.compile(rb"Training starts at step (?:[2-9]|1\d)"),
)
