# SPDX-License-Identifier: Apache-2.0
"""Submitted jobs and their results: history, states, faults, retries."""
