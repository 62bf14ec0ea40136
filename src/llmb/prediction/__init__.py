# SPDX-License-Identifier: Apache-2.0
"""Predicts the step time and memory of a run without running it."""
