# SPDX-License-Identifier: Apache-2.0
"""llmb's own engine as a program of a job; no module here imports torch."""
