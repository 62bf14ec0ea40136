# SPDX-License-Identifier: Apache-2.0
"""Results as tables and documents."""
