# SPDX-License-Identifier: Apache-2.0
"""Decoder models: Llama 3, Nemotron4 and Llama 4, with the parameter names of their Hugging Face checkpoints."""
