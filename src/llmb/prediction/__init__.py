# SPDX-License-Identifier: Apache-2.0
"""Predict the time and memory of a run from its plan alone. Pure."""
