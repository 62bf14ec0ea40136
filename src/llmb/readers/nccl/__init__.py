# SPDX-License-Identifier: Apache-2.0
"""What NCCL and nccl-tests print: collectives, bandwidths, and the network that was used."""
