# SPDX-License-Identifier: Apache-2.0
"""The machines that jobs run on: this one, and a cluster's settings."""
