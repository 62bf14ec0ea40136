# SPDX-License-Identifier: Apache-2.0
"""Short measurements of one machine's parts: their shapes, sizes, formulas and results; pure."""
