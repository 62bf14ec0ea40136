# SPDX-License-Identifier: Apache-2.0
"""Measures how fast machines train large language models."""

__version__ = "0.1.0"
