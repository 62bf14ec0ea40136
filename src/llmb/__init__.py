# SPDX-License-Identifier: Apache-2.0
"""Measures how fast machines train large language models.

Its functions, such as ``llmb.run``, ``llmb.judge`` and ``llmb.accept``, are loaded when they are first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_API = (
    *("LayoutPlan", "ParsedLogs", "Run", "RunComparison", "RunMemory", "RunPrediction", "RunVerdict", "Runs"),
    *("accept", "compare", "judge", "list_runs", "memory", "parse", "plan", "predict", "recipe", "report"),
    *("result", "run"),
)


def __getattr__(name: str) -> Any:  # noqa: ANN401 (whatever it is)
    if name not in _API:
        raise AttributeError(f"module 'llmb' has no attribute '{name}'")
    return getattr(import_module("llmb.cli.api"), name)


def __dir__() -> list[str]:
    return [*_API, "__version__"]
