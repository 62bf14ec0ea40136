# SPDX-License-Identifier: Apache-2.0
"""Converts weights between checkpoints and the forms of Hugging Face, NeMo and peft: use cases, without torch."""
