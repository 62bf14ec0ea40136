# SPDX-License-Identifier: Apache-2.0
"""The page of ``llmb report``: one HTML file with the verdicts, plots and tables of ended runs."""
