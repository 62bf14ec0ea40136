# SPDX-License-Identifier: Apache-2.0
"""Decoder models, built from the parts that a model's record names. Parameter names are the same for all of them."""
