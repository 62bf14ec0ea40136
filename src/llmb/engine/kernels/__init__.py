# SPDX-License-Identifier: Apache-2.0
"""The engine's own operations: pure functions of tensors, each with an eager reference."""
