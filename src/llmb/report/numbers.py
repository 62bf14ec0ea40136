# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them."""


def number(value: float | None) -> str:
    """Four significant digits, thousands whole; 'n/a' when unknown."""
    if value is None:
        return "n/a"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def unknown(reason: str) -> str:
    return f"n/a ({reason})"
