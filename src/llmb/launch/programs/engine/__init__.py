# SPDX-License-Identifier: Apache-2.0
"""llmb's own engine as a program; nothing here imports torch."""
