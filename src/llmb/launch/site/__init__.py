# SPDX-License-Identifier: Apache-2.0
"""The machines on which jobs run: this machine, and the settings of a cluster."""
