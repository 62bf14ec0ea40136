# SPDX-License-Identifier: Apache-2.0
"""Jobs and their results: planning, submission, states, history, verdicts, campaigns, archives."""
