# SPDX-License-Identifier: Apache-2.0
"""The programs that measure: the only part of benchmarks that imports torch."""
