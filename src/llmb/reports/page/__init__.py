# SPDX-License-Identifier: Apache-2.0
"""The page of ``llmb report``: one file with the verdicts, plots and tables of runs."""
