# SPDX-License-Identifier: Apache-2.0
"""The kinds of parallelism, and the setup that they share."""
