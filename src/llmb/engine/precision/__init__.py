# SPDX-License-Identifier: Apache-2.0
"""Training in FP8; ``docs/explanation/fp8.md`` explains it. ``apply`` replaces layers and sets scales once per step."""
