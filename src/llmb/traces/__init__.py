# SPDX-License-Identifier: Apache-2.0
"""Reads traces of profilers, and says where the time of a step went."""
