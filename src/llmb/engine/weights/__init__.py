# SPDX-License-Identifier: Apache-2.0
"""The program that converts weights, in bounded memory: the only part of conversion that imports torch."""
