# SPDX-License-Identifier: Apache-2.0
"""Formats numbers for people."""


def number(value: float | None) -> str:
    """Four significant digits, integers above 1,000; 'n/a' if unknown."""
    if value is None:
        return "n/a"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def unknown(reason: str) -> str:
    return f"n/a ({reason})"
