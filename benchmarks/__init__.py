# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the tool itself and of its engine; not part of the installed package."""
