# SPDX-License-Identifier: Apache-2.0
"""Jobs and their results: planning, submission, history, states, faults, retries, campaigns, archives."""
