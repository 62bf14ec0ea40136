# SPDX-License-Identifier: Apache-2.0
"""Processes that are started here: signals, and whole families of them."""
