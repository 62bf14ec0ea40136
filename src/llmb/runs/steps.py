# SPDX-License-Identifier: Apache-2.0
"""``metrics.jsonl``: one JSON object per step, in full precision."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """How evenly tokens went to routed experts, of all ranks and layers."""

    max_over_mean: float
    """Tokens of the busiest expert over the mean of its layer, in the layer where that is largest; 1 is balanced."""
    idle_experts: int
    """Experts that got no token; every layer has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Counts:
    """Tensors that were cast to FP8 in a step, of all layers together, and did not come out as they should."""

    saturated_tensors: int
    """Held values beyond the largest that their scale allows, which became that largest value."""
    not_finite_tensors: int
    """Held values that were infinite or not a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step. Memory is of the rank that needs most; times of ranks differ by what they wait for."""

    step: int
    step_time_s: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    peak_memory_bytes: int
    peak_memory_rank: int
    rank_step_time_s_min: float
    rank_step_time_s_max: float
    slowest_rank: int
    updated: bool = True
    """The parameters moved."""
    saving: bool = False
    """A checkpoint was being written meanwhile."""
    profiled: bool = False
    """Slowed down by a profiler or by NCCL's log, so that statistics leave it out."""
    expert_load: ExpertLoad | None = None
    """Null for a model without experts."""
    fp8: Fp8Counts | None = None
    """Null for a run that does not compute in FP8."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def values_text(self) -> str:
        """What makes a step invalid, for people."""
        return f"step {self.step}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"


def step_to_json(step: Step) -> str:
    """One line. JSON has no NaN: such a value becomes null and ``not_finite`` tells which it was."""
    values: dict[str, Any] = asdict(step)
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    spoiled = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
    values.update(dict.fromkeys(spoiled, None))
    if spoiled:
        values["not_finite"] = spoiled
    return json.dumps(values, allow_nan=False)


def step_from_json(line: str) -> Step:
    """Raises ValueError for a line that is not a whole step."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise TypeError("a step is a JSON object")
    spoiled = values.pop("not_finite", {})
    values.update({name: float(text) for name, text in spoiled.items()})
    load = values.pop("expert_load", None)
    fp8 = values.pop("fp8", None)
    return Step(**values, expert_load=load and ExpertLoad(**load), fp8=fp8 and Fp8Counts(**fp8))


def read_steps(path: Path) -> list[Step]:
    """All whole steps; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return []
    steps = []
    for line in path.read_text().splitlines():
        try:
            steps.append(step_from_json(line))
        except (ValueError, TypeError):
            break
    return steps
