# SPDX-License-Identifier: Apache-2.0
"""Who starts jobs: the scheduler of a cluster, or this machine."""
