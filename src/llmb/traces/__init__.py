# SPDX-License-Identifier: Apache-2.0
"""Reads profiler traces, and breaks down the time of a step."""
