# SPDX-License-Identifier: Apache-2.0
"""From a plan to running processes."""
