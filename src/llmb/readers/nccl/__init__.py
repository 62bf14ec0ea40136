# SPDX-License-Identifier: Apache-2.0
"""Readers of the output of NCCL and nccl-tests: collectives, bandwidths, and the network in use."""
