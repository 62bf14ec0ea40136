# SPDX-License-Identifier: Apache-2.0
"""What was submitted to a scheduler, and what became of it: history, states, faults, retries."""
