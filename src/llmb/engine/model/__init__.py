# SPDX-License-Identifier: Apache-2.0
"""Decoder models, built from the parts named in a model's record. All models use the same parameter names."""
