# SPDX-License-Identifier: Apache-2.0
"""torchtitan, PyTorch's own trainer, as a program of a job."""
