# SPDX-License-Identifier: Apache-2.0
"""Starting jobs by the scheduler of a cluster, or on this machine."""
