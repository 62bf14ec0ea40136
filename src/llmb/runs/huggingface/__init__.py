# SPDX-License-Identifier: Apache-2.0
"""Names, shapes, configuration and files of Hugging Face models. Does not import torch."""
