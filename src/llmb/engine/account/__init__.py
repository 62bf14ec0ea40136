# SPDX-License-Identifier: Apache-2.0
"""What one rank of a run takes: memory, FLOPs and collectives, without the devices of the run."""
