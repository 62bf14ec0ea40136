# SPDX-License-Identifier: Apache-2.0
"""Possible runs and their expected results: models, hardware, recipes and published figures, as data files."""
