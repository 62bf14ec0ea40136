# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe with somebody else's framework, in its own container; the framework is never imported here."""
