# SPDX-License-Identifier: Apache-2.0
"""torchtitan, the trainer of PyTorch's own developers, as a program."""
