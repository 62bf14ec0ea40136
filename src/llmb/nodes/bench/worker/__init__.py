# SPDX-License-Identifier: Apache-2.0
"""The programs that measure, which are the only modules of the benchmarks that import torch."""
