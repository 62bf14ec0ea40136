# SPDX-License-Identifier: Apache-2.0
"""Predict the step time and memory of a run without running it. Pure."""
