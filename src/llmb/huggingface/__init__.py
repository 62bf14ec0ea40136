# SPDX-License-Identifier: Apache-2.0
"""Models as Hugging Face keeps them: names, shapes, configuration and files. Knows no torch."""
