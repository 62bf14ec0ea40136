# SPDX-License-Identifier: Apache-2.0
"""Packages that preparation needs, and nothing else of llmb."""

from importlib.util import find_spec

from llmb.errors import EnvironmentProblem


def check_installed(what: str, *names: str) -> None:
    """Raises EnvironmentProblem where this Python lacks packages that ``what`` needs."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        text = f"{what} needs {' and '.join(missing)}, which this Python does not have"
        raise EnvironmentProblem(text, do="pip install 'llmb[prepare]'")
