# SPDX-License-Identifier: Apache-2.0
"""Operations of the engine's own: pure functions of tensors, each with an eager reference."""
