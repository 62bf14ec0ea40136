# SPDX-License-Identifier: Apache-2.0
"""Numbers about a run: FLOPs under named conventions, throughput, MFU, time to train, statistics. Pure."""
