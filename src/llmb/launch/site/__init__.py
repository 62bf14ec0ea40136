# SPDX-License-Identifier: Apache-2.0
"""Where jobs run: on this machine, or on a cluster with its settings."""
