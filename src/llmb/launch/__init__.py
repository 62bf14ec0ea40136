# SPDX-License-Identifier: Apache-2.0
"""Starting of jobs by the scheduler of a cluster, or on this machine."""
