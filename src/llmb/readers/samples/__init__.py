# SPDX-License-Identifier: Apache-2.0
"""Samples of a run's nodes and GPUs, such as power and memory; also their settings, error counters and other work."""
