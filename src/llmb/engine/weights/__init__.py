# SPDX-License-Identifier: Apache-2.0
"""Converts weights in bounded memory; this is the only part of conversion that imports torch."""
